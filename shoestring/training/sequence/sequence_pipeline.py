"""SequencePipeline: run slices of one sequence one after the other through a causal model, so that a pipeline has
micro-batches even with a batch of one (TeraPipe).

    pipeline of S stages, whole sequence      S t                        one stage works at a time
    in n slices                               sum t_i + (S - 1) max t_i  the longest slice fills and empties the pipeline

Alone, it makes every temporary tensor as small as the longest slice's; tensors kept for backward stay, because the
first slice runs backward last. Exact: the same gradients as the whole sequence, summed in another order. A slice counts
by its part of the loss, which is a mean over tokens. How slices attend to each other: sliced_attention.py; which models
can be cut: sliceable.py; best lengths: slices.py.
Li, Zhuang, Guo, Zhuo, Zhang, Song, Stoica: TeraPipe: Token-Level Pipeline Parallelism for Training Large-Scale Language
Models, 2021, arXiv 2102.07988.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from shoestring.core.batch import Batch, map_leaves, tensors, to_device
from shoestring.core.costs.ledger import Ledger
from shoestring.core.costs.ledger_parts import Trait
from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness
from shoestring.core.running.run import Run, Slice, weighted_loss
from shoestring.core.workers.sums import cut_range
from shoestring.training.sequence.sliceable import LEAST, refusal
from shoestring.training.sequence.sliced_attention import SliceSpan, Slicing, spans_of, takes_any, takes_positions
from shoestring.training.technique import TrainingTechnique

IGNORED = -100  # the label that losses of transformers ignore
TOLERANCE = 1e-6


@dataclass(frozen=True)
class SequencePipeline(TrainingTechnique):
    """Cut every sequence into slices that run one after the other.

    Costs: smaller products, which use the machine less well, and attention that reads the keys and values of all
    earlier slices.

    Not for: short sequences, or batches with enough samples: pieces of the batch (`Pipeline(pieces=...)`) cost
    less. It needs a causal model.
    """

    slices: int = 4  # number of equally long slices,
    lengths: str = (
        ""  # or: tokens of every slice, such as "512,300,212"; scaled in proportion for sequences of another length
    )

    order: ClassVar[int] = 2
    why: ClassVar[str] = "slices of a sequence, so that a pipeline has micro-batches even of one sample"

    def __post_init__(self) -> None:
        if self.slices < 1:
            raise Mistake(f"SequencePipeline(slices={self.slices}): a sequence has at least one slice")
        if self.lengths:
            parsed_lengths(self.lengths)

    @classmethod
    def choices(cls, ledger: Ledger) -> tuple[SequencePipeline, ...]:
        """Only when asked for: the ledger does not tell whether a model is causal."""
        return ()

    @property
    def count(self) -> int:
        return len(parsed_lengths(self.lengths)) if self.lengths else self.slices

    def exactness(self, ledger: Ledger) -> Exactness:
        return Exactness.DISTRIBUTION if ledger.has(Trait.DRAWS) else Exactness.ROUNDING

    def cost(self, ledger: Ledger) -> Ledger:
        """Everything is kept until the first slice runs backward; gradients stand from the last slice's backward on."""
        held = ledger.block_gradients
        share = ledger.pace(self.count)
        adding = (self.count - 1) * ledger.splitting.adding_seconds / max(held, 1.0)
        blocks = tuple(
            block.with_changes(
                gradient=0.0, forward=share * block.forward, backward=share * block.backward + adding * block.gradient
            )
            for block in ledger.blocks
        )
        return replace(
            ledger,
            blocks=blocks,
            slices=self.count,
            standing=replace(ledger.standing, gradients=ledger.standing.gradients + held),
        )

    def cut(self, length: int) -> tuple[int, ...]:
        """Tokens of every slice of a sequence; a sequence that is too short for all slices has fewer."""
        count = min(self.count, length)
        if not self.lengths:
            return tuple(stop - start for start, stop in cut_range(0, length, count))
        asked = parsed_lengths(self.lengths)[:count]
        return asked if sum(asked) == length else in_proportion(asked, length)

    def check_sliceable(self, run: Run, batch: Batch) -> SliceSupport:
        """What slicing needs to know about the run's model; refused if a batch like this one can't be cut as asked."""
        if length_of(batch) < self.count:
            raise Mistake(
                f"{self.count} slices of a sequence of {length_of(batch)} tokens: a slice needs a token; ask for fewer slices"
            )
        return slice_support(run, batch)

    def apply(self, run: Run) -> Run:
        found = None if run.example is None else self.check_sliceable(run, run.example())
        device = next(run.model.parameters()).device

        def slices(now: Run, batch: Batch) -> list[Slice]:
            nonlocal found
            found = self.check_sliceable(run, batch) if found is None else found
            return slices_of(now, found, to_device(batch, device), self.cut(length_of(batch)))

        return replace(
            run,
            cuts=replace(run.cuts, slices=slices),
            gradients=lambda now, batch: sliced_gradients(now, slices(now, batch)),
        )


def parsed_lengths(written: str) -> tuple[int, ...]:
    """
    >>> parsed_lengths("512, 300")
    (512, 300)
    """
    try:
        found = tuple(int(number) for number in written.strip("()[] ").rstrip(",").split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise Mistake(f'SequencePipeline(lengths={written!r}): give the tokens of every slice, such as "512,300,212"')
    return found


def in_proportion(asked: Sequence[int], length: int) -> tuple[int, ...]:
    """Lengths in the same proportions with another sum; each is at least one token.

    >>> in_proportion((4, 2, 2), 12)
    (6, 3, 3)
    """
    for least in (0, 1):  # the second time every slice gets one token before the others are distributed
        ends = [(length - least * len(asked)) * span.stop // sum(asked) for span in spans_of(asked)]
        found = tuple(least + end - before for before, end in zip((0, *ends), ends, strict=False))
        if min(found) > 0:
            break
    return found


@dataclass(frozen=True)
class SliceSupport:
    """Properties of a model that can run in slices."""

    shifts: bool  # it shifts the labels itself: label i + 1 belongs to token i
    own: bool  # training uses the model's own loss, a mean over the labels that count


def slice_support(run: Run, batch: Batch) -> SliceSupport:
    """What slicing needs to know about a run's model; refused if its sequences can't be cut."""
    length = length_of(batch)
    if length < LEAST:
        raise Mistake(
            f"SequencePipeline: sequences of {length} tokens are too short for slices: {LEAST} or more are needed to see what the model "
            "does with them"
        )
    shifts = shifts_labels(run.model, batch)
    with_labels = with_shifted_labels(batch) if shifts else batch
    why, own = refusal(
        run.model, run.blocks, run.outside.evaluate, run.loss, lambda span: rows(with_labels, span), length
    )
    if why:
        raise Mistake(f"SequencePipeline: the model can't run in slices of a sequence: {why}")
    return SliceSupport(shifts, own)


def shifts_labels(model: nn.Module, batch: Batch) -> bool:
    """Whether it is a language model of transformers that shifts labels itself, and also accepts shifted labels."""
    if not isinstance(batch, Mapping) or not isinstance(batch.get("labels"), Tensor):
        return False
    return any(
        takes_any(part) and getattr(getattr(part, "loss_function", None), "__name__", "") == "ForCausalLMLoss"
        for part in takes_positions(model)
    )


def with_shifted_labels(batch: Batch) -> Batch:
    """A batch with every token's own label beside it, because the label of a slice's last token stands in the next
    slice."""
    labels = batch["labels"]
    own = functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    return type(batch)({**batch, "shift_labels": own})


def slices_of(run: Run, found: SliceSupport, batch: Batch, lengths: Sequence[int]) -> list[Slice]:
    """A batch in slices, in their forward order; backward runs in reverse."""
    whole = with_shifted_labels(batch) if found.shifts else batch
    slicing = Slicing(run.model, run.blocks, lengths)
    pieces = [rows(whole, span) for span in slicing.spans]
    if found.shifts and found.own:
        weights, total = [label_count(piece["shift_labels"]) for piece in pieces], label_count(whole["shift_labels"])
    else:
        weights, total = [float(run.cuts.weight(piece)) for piece in pieces], float(run.cuts.weight(batch))
        if abs(sum(weights) - total) > TOLERANCE * abs(total):
            raise Mistake(
                f"SequencePipeline: the slices of a batch with the weight {total:g} have the weight {sum(weights):g} together: the job's "
                f"weight must count tokens, such as weight=lambda batch: batch[1].numel()"
            )
    if not total > 0 and run.team.link.world == 1:  # with several workers, another one's part may count
        raise Mistake(f"the batch has the weight {total:g}: a mean over nothing; check the job's weight")
    return [
        Slice(piece, weight / (total or 1.0), partial(slicing.at, number))
        for number, (piece, weight) in enumerate(zip(pieces, weights, strict=True))
    ]


def label_count(labels: Tensor) -> float:
    return float((labels != IGNORED).sum())


def sliced_gradients(now: Run, slices: Sequence[Slice]) -> Tensor:
    """All slices forward, then all backward, the last one first, so that its gradients of earlier keys and values are
    there in time."""
    values: list[Tensor] = []
    for one in slices:
        with one.within():
            values.append(weighted_loss(now.loss(now.forward(now.model, one.batch), one.batch), one.share))
    total = torch.stack([value.detach() for value in values]).sum()
    for number, one in reversed(list(enumerate(slices))):
        with one.within():
            now.backward(replace(now, last=now.last and number == 0), values.pop())
    return total


def length_of(batch: Batch) -> int:
    """The number of tokens in a batch's sequences: the second dimension, which its tensors share."""
    found = [tensor for tensor in tensors(batch) if tensor.dim() > 1]
    lengths = {tensor.shape[1] for tensor in found}
    if len(lengths) != 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors(batch)) or "no tensor at all"
        raise Mistake(
            f"SequencePipeline: a batch that can't be cut along its tokens: its tensors have the shapes {shapes}; give tokens as the "
            f"second dimension of all that have two or more"
        )
    length = lengths.pop()
    square = next((tensor for tensor in found if length in tensor.shape[2:]), None)
    if square is not None and length > 1 and not square.is_floating_point():
        raise Mistake(
            f"SequencePipeline: a batch that can't be cut along its tokens: a tensor of the shape {tuple(square.shape)} has them twice"
        )
    return length


def rows(batch: Batch, span: SliceSpan) -> Batch:
    """One slice of a batch."""
    return map_leaves(
        lambda leaf: (
            leaf[:, span.start : span.stop].contiguous() if isinstance(leaf, Tensor) and leaf.dim() > 1 else leaf
        ),
        batch,
    )
