"""TensorParallel: workers hold parts of the same layers, and every one of them computes its part for the whole batch.

    memory     weights, gradients and optimizer state of split layers / w; activations inside them / w, of what lies between none
    sent       2 sums of a block's output forward and 2 backward, of 2 (w - 1) / w  bytes each; and a few around the vocabulary
    sequence   what lies between is split along the sequence, for the same bytes: its activations / w too, but for what split layers take

The layers of a pair are split by outputs and then by inputs: attention by its heads, the two layers of an MLP, so that what lies inside a
pair is never put together. Embedding and head are split by the vocabulary, and the cross entropy is computed in parts. Exact, but
for the order of sums; inside split layers every worker draws its own numbers, elsewhere all draw the same.
Only modules that are known are split (training/tensor/layer_kinds.py): others are refused before anything is changed.
Shoeybi et al.: Megatron-LM, 2019, arXiv 1909.08053; Korthikanti et al.: Reducing Activation Recomputation in Large Transformer Models,
2022, arXiv 2205.05198.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor, nn

from shoestring.core.batch import Batch
from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness
from shoestring.core.ledger import Ledger
from shoestring.core.link import Link
from shoestring.core.run import Run
from shoestring.core.stepping import StepDivision
from shoestring.training.data_parallel.data_parallel import unaddable, with_traffic
from shoestring.training.technique import Owned, TrainingTechnique
from shoestring.training.tensor.layer_kinds import recognised
from shoestring.training.tensor.split_layers import TensorParts

MOST = 8  # ways that are tried: more than a machine has devices are seldom worth it
BETWEEN = 5  # tensors of the size of a block's output that it keeps outside of split layers: two norms' inputs and results, the output
GATHERED = 2  # of those, what layers that are split by outputs take in and keep, which is whole wherever it was put together from
WORK = ("forward", "backward", "flops", "backward_flops")  # of a block: as much as there are samples


@dataclass(frozen=True)
class TensorParallel(TrainingTechnique):
    ways: int = 2  # workers that share every split layer
    sequence: bool = False  # what lies between split layers is split too, along the sequence

    order: ClassVar[int] = 8  # before all that look at the size of weights
    exact: ClassVar[bool] = True
    unites: ClassVar[str] = "tensor"
    divides: ClassVar[StepDivision] = StepDivision.IN_PARTS
    why: ClassVar[str] = "every worker computes a part of each layer: heads, columns, words of the vocabulary"

    def __post_init__(self) -> None:
        if isinstance(self.ways, bool) or not isinstance(self.ways, int) or self.ways < 2:
            raise Mistake(
                f"TensorParallel(ways={self.ways!r}): give the number of workers that share a layer, 2 or more"
            )

    @property
    def across(self) -> int:
        return self.ways

    @classmethod
    def choices(cls, ledger: Ledger) -> tuple[TensorParallel, ...]:
        world = ledger.workers.world
        ways = [ways for ways in range(2, min(world, MOST) + 1) if world % ways == 0]
        return tuple(cls(count, sequence) for count in ways for sequence in (False, True)) or (cls(),)

    @classmethod
    def noticed(cls, run: Run) -> frozenset[str]:
        """In how many ways the model can't be split, and why: its step does not show that."""
        return frozenset(unsplit(ways) + reason for ways in range(2, MOST + 1) if (reason := refused(run, ways)))

    @property
    def owns(self) -> frozenset[Owned]:
        return frozenset({Owned.WEIGHTS})

    def refusal(self, ledger: Ledger) -> str:
        if ledger.workers.world == 1:
            return "there is one worker: --devices gives more"
        if ledger.workers.world % self.ways:
            return f"{ledger.workers.world} workers can't stand in lines of {self.ways}"
        if reason := super().refusal(ledger):
            return reason
        reasons = (
            trait.removeprefix(known)
            for trait in ledger.findings.traits
            if trait.startswith(known := unsplit(self.ways))
        )
        return next(reasons, "") or unaddable(ledger)

    def exactness(self, ledger: Ledger) -> Exactness:
        return Exactness.DRAWS if ledger.has("draws") else Exactness.ROUNDING

    def cost(self, ledger: Ledger) -> Ledger:
        """Of a block, what lies between its split layers stays whole; of its bytes that is some tensors as large as its output."""
        ways, parted = self.ways, larger_part(ledger, self.ways)
        blocks, sums = [], 0.0
        for block in parted.blocks:
            outside = min(BETWEEN * block.output, block.kept) if block.inside else 0.0
            gathered = GATHERED / BETWEEN * outside
            whole = gathered + (outside - gathered) / ways if self.sequence else outside
            blocks.append(
                block.changed(
                    kept=whole + (block.kept - outside) / ways,
                    rise=whole + (block.rise - min(outside, block.rise)) / ways,
                    spike=block.spike / ways + block.output,
                    gradient=block.gradient / ways,
                    forward=block.forward / ways,
                    backward=block.backward / ways,
                    flops=block.flops / ways,
                    backward_flops=block.backward_flops / ways,
                )
            )
            sums += 4 * block.output if block.inside else 0.0
        sums += (3 if self.sequence else 2) * max(
            (block.output for block in parted.inside), default=0.0
        )  # vocabulary and ends
        standing, update = parted.standing, parted.update
        standing = replace(
            standing,
            parameters=standing.parameters / ways,
            optimizer=standing.optimizer / ways,
            gradients=standing.gradients / ways,
        )
        update = replace(update, seconds=update.seconds / ways, rise=update.rise / ways)
        found = replace(parted, blocks=tuple(blocks), standing=standing, update=update)
        return with_traffic(found, parted.pieces * 2 * (ways - 1) / ways * sums, parted.pieces * 4.0 * len(blocks))

    def apply(self, run: Run) -> Run:
        link = run.mesh.along(self.unites)
        check(run, link, self.ways)
        parts = TensorParts(run, link, self.sequence)

        def forward(model: nn.Module, batch: Batch) -> Any:
            with parts.inside(), parts.guard():
                return run.forward(model, batch)

        def loss(output: Any, batch: Batch) -> Tensor:
            with parts.guard():
                return run.loss(output, batch)

        def backward(now: Run, value: Tensor) -> None:
            with parts.inside(), parts.adding_up():  # blocks may be computed again there
                run.backward(now, value)

        def summed(number: Tensor) -> None:
            link.sum(number).wait()
            run.summed(number)

        @contextmanager
        def usable() -> Iterator[None]:
            with parts.usable(), run.usable():
                yield

        @contextmanager
        def together() -> Iterator[None]:
            with parts.inside(), run.together() if run.together is not None else run.usable():
                yield

        return replace(
            run,
            forward=forward,
            loss=loss,
            backward=backward,
            summed=summed,
            usable=usable,
            share=lambda weight: parts.share(weight) * run.share(weight),
            together=together,
            state={**run.state, "tensor parts": parts},
        )


def check(run: Run, link: Link, ways: int) -> None:
    """Refuse what can't be split, before anything is changed."""
    if link.world != ways:
        raise Mistake(
            f"TensorParallel(ways={ways}): there are {link.world} workers along tensor: give --devices a multiple of {ways}"
        )


def unsplit(ways: int) -> str:
    """The trait of a model whose layers can't be split so many ways begins with this; the rest is the reason."""
    return f"not split {ways} ways: "


def refused(run: Run, ways: int) -> str:
    try:
        recognised(run.model, run.blocks, ways)
    except Mistake as error:
        return str(error)
    return ""


def larger_part(ledger: Ledger, times: int) -> Ledger:
    """The ledger of a worker whose part of the batch is so many times as large, because the workers of its line share it."""
    return ledger.by_fewer_copies(times)
