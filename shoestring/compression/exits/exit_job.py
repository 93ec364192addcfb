"""Train heads for early exits by an ordinary job.

    loss = w_end loss(end) + sum_k w_k loss(exit_k)                               train="all": trunk and heads (BranchyNet, Shallow-Deep)
    loss = sum_k w_k loss(exit_k), trunk frozen and in evaluation mode            train="heads": the model's output is unchanged (DeeBERT)
    distil: loss(exit_k) = T^2 KL( softmax(end / T) || softmax(exit_k / T) )      no labels are read

Kaya, Hong, Dumitras: Shallow-Deep Networks, 2019, arXiv 1810.07052; Xin et al.: DeeBERT, 2020, arXiv 2004.12993; temperature: Hinton,
Vinyals, Dean: Distilling the Knowledge in a Neural Network, 2015, arXiv 1503.02531.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoestring.compression.exits.blocks import chain_of
from shoestring.compression.exits.early_exit import EarlyExitModel, Head
from shoestring.compression.exits.rows import hidden_state, logits_of, with_logits
from shoestring.core.batch import Batch
from shoestring.core.errors import Mistake
from shoestring.core.job import Job, default_loss
from shoestring.data.feed import Feed

MakeHead = Callable[[torch.Size, int], nn.Module]  # from a hidden state's shape (rows first) and the number of classes


class AllExits(NamedTuple):
    """Logits of every exit, and the model's own output."""

    exits: tuple[Tensor, ...]
    end: Any


class ExitTraining(EarlyExitModel):
    """An EarlyExitModel that computes all exits for all rows, as training needs; its state dict is that of an
    EarlyExitModel."""

    def __init__(
        self, model: nn.Module, heads: Mapping[int, nn.Module], frozen: bool, measure: str = "probability"
    ) -> None:
        super().__init__(model, heads, measure=measure)
        self.frozen = frozen
        if frozen:
            model.requires_grad_(False)
            model.eval()

    def train(self, mode: bool = True) -> ExitTraining:
        super().train(mode)
        if self.frozen:
            self.model.eval()  # batch norms keep their statistics, and dropout is off
        return self

    def forward(self, *args: Any, **kwargs: Any) -> AllExits:
        return AllExits(*self.all_exits(*args, **kwargs))

    def early(self, thresholds: Sequence[float] | None = None) -> EarlyExitModel:
        """The same model and heads, with rows that leave."""
        return EarlyExitModel(
            self.model, {int(name): head for name, head in self.heads.items()}, thresholds, self.measure
        ).eval()


def exit_job(
    job: Job,
    after: Sequence[int],
    *,
    train: str = "all",
    weights: Sequence[float] | None = None,
    end_weight: float = 1.0,
    distil: bool = False,
    temperature: float = 2.0,
    head: MakeHead | None = None,
    measure: str = "probability",
) -> Job:
    """A job that trains heads after these numbers of blocks, with or without the trunk; its model returns `AllExits`,
    and has `.early(...)`.

    weights weight of each exit's loss (default 1); `end_weight`: of the model's own loss, train="all" only distil exits
    are trained towards the model's own output, without labels head makes a head from the hidden state's shape and the
    number of classes (default: `usual_head`) If the job uses the loss of a transformers model, exits use cross entropy
    with the batch's labels. Metrics are the job's, for the end and, with `_exit_2` after their name, for each exit. One
    batch is run through the model now, to find shapes.
    """
    if train not in ("all", "heads"):
        raise Mistake(f'train={train!r}: give "all" (trunk and heads) or "heads" (the trunk stays as it is)')
    after = tuple(sorted(after))
    shares = shares_of(weights, after)
    shapes, classes = shapes_of(job, after)
    make, frozen = head or usual_head, train == "heads"

    def model() -> nn.Module:
        return ExitTraining(job.model(), {number: make(shapes[number], classes) for number in after}, frozen, measure)

    def loss(output: Any, batch: Batch) -> Tensor:
        found: Tensor = output.exits[0].new_zeros(()) if frozen else end_weight * job.loss(output.end, batch)
        end = logits_of(output.end).detach()
        for share, logits in zip(shares, output.exits, strict=True):
            found = found + share * (
                divergence(logits, end, temperature) if distil else exit_loss(job, logits, output.end, batch)
            )
        return found

    def metrics(output: Any, batch: Batch) -> Mapping[str, Any]:
        assert job.metrics is not None, "else it is not given"
        kind = type(output.end)
        at = {
            f"{name}_exit_{number}": value
            for number, logits in zip(after, output.exits, strict=True)
            for name, value in job.metrics(with_logits(kind, logits), batch).items()
        }
        return {**job.metrics(output.end, batch), **at}

    return replace(job, model=model, loss=loss, metrics=metrics if job.metrics is not None else None)


def shares_of(weights: Sequence[float] | None, after: Sequence[int]) -> tuple[float, ...]:
    """The weight of each exit's loss."""
    shares = tuple(weights) if weights is not None else (1.0,) * len(after)
    if len(shares) != len(after) or any(not share >= 0 for share in shares):
        raise Mistake(f"weights={shares} for exits after {after}: give one for each, 0 or more")
    return shares


def divergence(logits: Tensor, target: Tensor, temperature: float) -> Tensor:
    """T^2 KL(target || logits), mean over rows."""
    return temperature**2 * nn.functional.kl_div(
        torch.log_softmax(logits / temperature, 1),
        torch.log_softmax(target / temperature, 1),
        log_target=True,
        reduction="batchmean",
    )


def exit_loss(job: Job, logits: Tensor, end: Any, batch: Batch) -> Tensor:
    """The job's loss of an exit's logits."""
    if job.loss is default_loss and not isinstance(
        end, Tensor
    ):  # the model computes its loss itself, from its own logits
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() != 1:
            raise Mistake(
                "the model brings its own loss, which it has for its last output only, and the batch has no `labels` that are "
                "classes: give the Job a loss of (output, batch), or exit_job(..., distil=True)"
            )
        return nn.functional.cross_entropy(logits, labels)
    return job.loss(with_logits(type(end), logits), batch)


def usual_head(shape: torch.Size, classes: int) -> Head:
    """The default head: for maps, means over 2 x 2 fields; for tokens, the first token; else the hidden state itself.

    >>> usual_head(torch.Size((8, 64, 7, 7)), 10).pool
    'grid'
    """
    pools = {4: ("grid", shape[1]), 3: ("first", shape[-1]), 2: ("none", shape[-1])}
    if len(shape) not in pools:
        raise Mistake(
            f"a block gives a hidden state of shape {tuple(shape)}, for which there is no usual head: give "
            f"head=lambda shape, classes: ..."
        )
    pool, width = pools[len(shape)]
    return Head(width, classes, pool, grid=2 if pool == "grid" and min(shape[2:]) > 1 else 1)


def shapes_of(job: Job, after: Sequence[int]) -> tuple[dict[int, torch.Size], int]:
    """Shapes of the hidden states after some blocks, and the number of classes, found by running one batch through the
    job's model."""
    model = job.model().eval()
    blocks = list(chain_of(model).values())
    found: dict[int, torch.Size] = {}
    if not after or min(after) < 1 or max(after) >= len(blocks):
        raise Mistake(
            f"exits after blocks {tuple(after)} of a model with {len(blocks)} blocks: give numbers from 1 to {len(blocks) - 1}"
        )

    def noting(number: int) -> Callable[..., None]:
        return lambda module, given, output: found.__setitem__(number, hidden_state(output).shape)

    handles = [blocks[number - 1].register_forward_hook(noting(number)) for number in after]
    with torch.no_grad():
        output = job.forward(model, next(iter(Feed(job))))
    for handle in handles:
        handle.remove()
    if len(found) < len(after):
        raise Mistake(
            f"the model's forward calls only some of its blocks ({sorted(found)} of {tuple(after)}): choose exits after "
            f"those"
        )
    return found, logits_of(output).shape[-1]
