"""TensorParallel: workers hold parts of the same layers, and each computes its part for the whole batch (Megatron).

    memory     weights, gradients and optimizer state of split layers / w; activations inside them / w, those between them whole
    sent       2 all-reduces of a block's output forward and 2 backward, 2 (w - 1) / w  bytes per byte; and a few for the vocabulary
    sequence   activations between split layers are split along the sequence, for the same traffic: / w too, except split layers' inputs

Layers are split in pairs, the first by outputs and the second by inputs: attention by heads, and the two layers of an
MLP, so activations inside a pair are never whole. Embedding and head are split by the vocabulary, and the cross entropy
is computed in parts. Exact, up to the order of sums; inside split layers every worker draws its own random numbers,
elsewhere all draw the same.
Only known modules are split (training/tensor/layer_kinds.py): others are refused before anything is changed.
Shoeybi et al.: Megatron-LM, 2019, arXiv 1909.08053; Korthikanti et al.: Reducing Activation Recomputation in Large
Transformer Models, 2022, arXiv 2205.05198.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor, nn

from shoestring.core.batch import Batch
from shoestring.core.costs.ledger import Ledger
from shoestring.core.costs.ledger_parts import Trait
from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness
from shoestring.core.optimization.stepping import StepDivision
from shoestring.core.running.run import Run
from shoestring.core.workers.link import Link
from shoestring.training.data_parallel.data_parallel import gradient_sum_refusal, with_traffic
from shoestring.training.group_technique import GroupTechnique
from shoestring.training.technique import Owned
from shoestring.training.tensor.layer_kinds import recognise_layers
from shoestring.training.tensor.split_layers import TensorParts

MOST = 8  # ways to try: more than a machine's devices are seldom worth it
BETWEEN = 5  # tensors that a block keeps outside of split layers: its output, two norms' inputs and results
GATHERED = 2  # of those, the inputs that layers split by outputs keep: they are whole in any case


@dataclass(frozen=True)
class TensorParallel(GroupTechnique):
    """Split every layer among the workers.

    Costs: four sums of a block's output in every step and block, more than a pipeline sends.

    Not for: slow links, small layers, and models whose layers it does not know: the built-in `gpt` and GPT-2- and
    Llama-like ones it does.
    """

    ways: int = 2  # workers that share every split layer
    sequence: bool = False  # also split activations between split layers, along the sequence

    order: ClassVar[int] = 8  # before all techniques that look at the size of weights
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
    def traits_of_run(cls, run: Run) -> frozenset[str]:
        """For each number of ways that the model can't be split, a trait with the reason: the step does not show
        that."""
        return frozenset(
            unsplit_trait(ways) + reason for ways in range(2, MOST + 1) if (reason := split_refusal(run, ways))
        )

    @property
    def owns(self) -> frozenset[Owned]:
        return frozenset({Owned.WEIGHTS})

    def refusal(self, ledger: Ledger) -> str:
        if ledger.workers.world == 1:
            return "there is one worker: --devices gives more"
        if ledger.workers.world % self.ways:
            return f"{ledger.workers.world} workers can't be divided into groups of {self.ways}"
        if reason := super().refusal(ledger):
            return reason
        reasons = (
            trait.removeprefix(known)
            for trait in ledger.findings.traits
            if trait.startswith(known := unsplit_trait(self.ways))
        )
        return next(reasons, "") or gradient_sum_refusal(ledger)

    def exactness(self, ledger: Ledger) -> Exactness:
        return Exactness.DISTRIBUTION if ledger.has(Trait.DRAWS) else Exactness.ROUNDING

    def cost(self, ledger: Ledger) -> Ledger:
        """In a block, activations between split layers stay whole: a few tensors as large as the block's output."""
        ways, parted = self.ways, larger_part(ledger, self.ways)
        blocks, sums = [], 0.0
        for block in parted.blocks:
            outside = min(BETWEEN * block.output, block.kept) if block.inside else 0.0
            gathered = GATHERED / BETWEEN * outside
            whole = gathered + (outside - gathered) / ways if self.sequence else outside
            blocks.append(
                block.with_changes(
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
        )  # the vocabulary, and code before the first and after the last block
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
        link = run.team.mesh.along(self.unites)
        check(run, link, self.ways)
        parts = TensorParts(run, link, self.sequence)

        def forward(model: nn.Module, batch: Batch) -> Any:
            with parts.inside(), parts.guard():
                return run.forward(model, batch)

        def loss(output: Any, batch: Batch) -> Tensor:
            with parts.guard():
                return run.loss(output, batch)

        def backward(now: Run, value: Tensor) -> None:
            with parts.inside(), parts.adding_up():  # blocks may be recomputed there
                run.backward(now, value)

        def sum_and_wait(number: Tensor) -> None:
            link.sum(number).wait()
            run.held.summed(number)

        return replace(
            run,
            forward=forward,
            loss=loss,
            backward=backward,
            outside=run.outside.within(parts.usable, parts.inside),
            held=replace(
                run.held, summed=sum_and_wait, share=lambda weight: parts.share(weight) * run.held.share(weight)
            ),
            state={**run.state, "tensor parts": parts},
        )


def check(run: Run, link: Link, ways: int) -> None:
    """Refuse models that can't be split, before anything is changed."""
    if link.world != ways:
        raise Mistake(
            f"TensorParallel(ways={ways}): there are {link.world} workers along tensor: give --devices a multiple of {ways}"
        )


def unsplit_trait(ways: int) -> str:
    """The prefix of the trait of a model that can't be split so many ways; the reason follows."""
    return f"not split {ways} ways: "


def split_refusal(run: Run, ways: int) -> str:
    try:
        recognise_layers(run.model, run.blocks, ways)
    except Mistake as error:
        return str(error)
    return ""


def larger_part(ledger: Ledger, times: int) -> Ledger:
    """The ledger of a worker whose part of the batch is `times` as large, because the workers of its line share it."""
    return ledger.by_fewer_copies(times)
