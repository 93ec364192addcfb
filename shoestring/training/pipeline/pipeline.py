"""Pipeline: every worker holds some layers of the model (a stage); a batch passes through the stages in micro-batches.

    idle        (S - 1) / (M + S - 1)         with S stages and M equal micro-batches, for gpipe and 1f1b; schedule.py has the others
    memory      weights / S                   and the activations of micro-batches in flight: at most S - s at stage s with 1f1b
    sent        values that cross a cut, once forward, and their gradients once backward

Exact: the gradients of all micro-batches are summed before the update, as with gradient accumulation in one process.
Values that cross several cuts (skip connections, masks that blocks make) are passed on from stage to stage; a weight
that several stages use is held by each of them, and its gradients are summed. With `pipedream` weights are updated
after every micro-batch instead, and nobody waits (training/pipeline/pipedream.py): that is inexact, and gradients are S
- 1 - s updates late at stage s.
Huang et al.: GPipe, 2018, arXiv 1811.06965; Narayanan et al.: PipeDream, 2018, arXiv 1806.03377.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

from torch import Tensor

from shoestring.core.command_line.suggest import did_you_mean
from shoestring.core.costs.ledger import NO_BLOCK_RUNS, Ledger
from shoestring.core.costs.ledger_parts import Trait
from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness
from shoestring.core.model.swap import Swap
from shoestring.core.optimization.stepping import StepDivision
from shoestring.core.running.run import HeldWeights, OutsideSteps, Run
from shoestring.core.workers.mesh import Mesh
from shoestring.core.workers.staging import Staging
from shoestring.training.group_technique import StagedTechnique
from shoestring.training.pipeline.cost import STASHING, Pipe, pipe_of
from shoestring.training.pipeline.partition.partition import smallest_maximum
from shoestring.training.pipeline.pipedream import CLIPS, PipeDream
from shoestring.training.pipeline.schedule import SCHEDULES, Orders, check_schedule, orders
from shoestring.training.pipeline.settings import worth_trying
from shoestring.training.pipeline.stages.one_process import StagesHere, mail_meshes
from shoestring.training.pipeline.stages.shared_norms import STATISTICS, playable
from shoestring.training.pipeline.stages.stages import Stages
from shoestring.training.pipeline.stages.walk import Chain
from shoestring.training.technique import MIXED, Owned, TrainingTechnique

FURTHER = 2.5  # upper bound per micro-batch: how many times farther than plain training pipedream's updates go


@dataclass(frozen=True)
class Pipeline(StagedTechnique):
    """Divide the model into stages, one for each worker, and send a batch through them in pieces.

    Costs: idle time while the line fills and drains, and values and gradients sent across every cut.

    Not for: models that fit one worker: `DataParallel` leaves nobody idle. Nor for models whose code is not a chain
    of blocks.
    """

    stages: int = 2  # workers that a model is divided between
    pieces: int = 0  # micro-batches per batch; 0: four times as many as stages
    schedule: str = "1f1b"  # who does what when: "naive", "gpipe", "1f1b", "interleaved", "zero-bubble", "pipedream"
    balance: tuple[int, ...] = ()  # blocks in each chunk, in order; empty: weights as equal as possible
    chunks: int = 1  # chunks per worker, for `interleaved`
    vertical: bool = (
        False  # for `pipedream`: every stage uses the weight version that the first stage used for the micro-batch
    )
    flush: int = 16  # for `pipedream`: steps between two drains of the pipeline

    order: ClassVar[int] = 12
    exact: ClassVar[bool] = True
    unites: ClassVar[str] = "stage"
    splits_batch: ClassVar[bool] = True
    divides: ClassVar[StepDivision] = StepDivision.APART
    why: ClassVar[str] = "every worker holds some layers; a batch passes through them in micro-batches"

    def __post_init__(self) -> None:
        for name, value in (
            ("stages", self.stages),
            ("pieces", self.pieces),
            ("chunks", self.chunks),
            ("flush", self.flush),
        ):
            if not isinstance(value, int):
                raise Mistake(f"Pipeline({name}={value!r}): give a whole number")
        object.__setattr__(self, "balance", tuple(self.balance))
        if self.stages < 1 or self.pieces < 0 or self.chunks < 1:
            raise Mistake(
                f"Pipeline(stages={self.stages}, pieces={self.pieces}, chunks={self.chunks}): give positive numbers"
            )
        if self.schedule not in SCHEDULES:
            raise Mistake(
                f"Pipeline(schedule={self.schedule!r}): there are {', '.join(SCHEDULES)}{did_you_mean(self.schedule, SCHEDULES)}"
            )
        if self.balance and (len(self.balance) != self.stages * self.chunks or min(self.balance) < 1):
            raise Mistake(
                f"Pipeline(balance={list(self.balance)}): give the number of blocks, at least one, of each of the "
                f"{self.stages * self.chunks} parts that {self.stages} stages x {self.chunks} chunks are"
            )
        check_schedule(self.schedule, self.stages, self.pieces_wanted, self.chunks)
        if not self.stashes and (self.vertical or self.flush != type(self).flush):
            raise Mistake(
                f"Pipeline(schedule={self.schedule!r}): vertical and flush are for schedule='pipedream'; leave them out"
            )
        if self.flush < 1:
            raise Mistake(f"Pipeline(flush={self.flush}): give 1 or more steps between two drains of the pipeline")
        if self.stashes and self.pieces_wanted < self.stages:
            raise Mistake(
                f"Pipeline(stages={self.stages}, pieces={self.pieces}, schedule='pipedream'): a batch of fewer pieces than "
                f"stages does not fill the pipeline, which would drain after each: give pieces={self.stages} or more"
            )

    @property
    def stashes(self) -> bool:
        return self.schedule == STASHING

    @property
    def agrees(self) -> float:
        return 1 / self.flush if self.stashes else 1.0

    def agreements(self, steps: int) -> int:
        return -(-steps // self.flush) if self.stashes else steps

    def talking(self, steps: int) -> dict[TrainingTechnique, int]:
        """Pipedream sends as much over all steps as if the pipeline drained after each step."""
        return {replace(self, flush=1): steps} if self.stashes and steps else {}

    @property
    def label(self) -> str:
        return f"Pipeline({self.schedule})"

    @property
    def across(self) -> int:
        return self.stages

    @property
    def pieces_wanted(self) -> int:
        return self.pieces or 4 * self.stages

    @property
    def parts(self) -> int:
        return self.pieces_wanted

    def orders(self, pieces: int) -> Orders:
        return known_orders(self.schedule, self.stages, pieces, self.chunks)

    @classmethod
    def choices(cls, ledger: Ledger) -> tuple[Pipeline, ...]:
        return tuple(cls(one.stages, one.pieces, one.schedule, one.balance, one.chunks) for one in worth_trying(ledger))

    @classmethod
    def settings_to_explain(cls, ledger: Ledger) -> tuple[Pipeline, ...]:
        return cls.choices(ledger) or (cls(),)

    @property
    def owns(self) -> frozenset[Owned]:
        return frozenset({Owned.WEIGHTS, Owned.GROUPS})

    def refusal(self, ledger: Ledger) -> str:
        if ledger.has(Trait.NO_BLOCK_RUNS):
            return NO_BLOCK_RUNS
        if self.stashes and ledger.has(Trait.CLIPS):
            return CLIPS
        world, calls, parts = ledger.workers.world, len(ledger.inside), self.stages * self.chunks
        if world % self.stages:
            return (
                f"{world} workers can't be divided into pipelines of {self.stages} stages: give a multiple of {self.stages} as "
                f"--devices"
            )
        if parts > calls:
            return f"the model calls {calls} blocks, and {parts} parts need at least one each: give fewer stages"
        if self.balance and sum(self.balance) != calls:
            return f"balance={list(self.balance)} places {sum(self.balance)} blocks, and the model calls {calls}"
        if ledger.has(Trait.UNSPLITTABLE):
            return ledger.findings.reasons.get(Trait.UNSPLITTABLE, "a batch can't be split")
        if ledger.has(Trait.SPARSE_GRADIENTS):
            return "the model has sparse gradients, which are not sent between workers: make its embeddings with sparse=False"
        return super().refusal(ledger)

    def exactness(self, ledger: Ledger) -> Exactness:
        if ledger.has(Trait.MIXES_SAMPLES) or self.stashes:
            return Exactness.CHANGED
        return Exactness.DISTRIBUTION if ledger.has(Trait.DRAWS) else Exactness.ROUNDING

    def drift(self, ledger: Ledger) -> float:
        """With pipedream a batch of M micro-batches is M updates at the job's rate, so weights move farther. With a
        constant gradient and momentum 0.9, ten steps move 41 times rate x gradient, and 10 M steps 100 M - 90 times
        that."""
        return (MIXED if ledger.has(Trait.MIXES_SAMPLES) or not self.stashes else 0.0) + (
            FURTHER * self.pieces_wanted if self.stashes else 0.0
        )

    def making(self) -> AbstractContextManager[object]:
        """A worker constructs the whole model and keeps a part of it; weights that do not fit are swapped to a file
        meanwhile."""
        return Swap()

    def cost(self, ledger: Ledger) -> Ledger:
        """The ledger of the worker that needs most; see training/pipeline/cost.py."""
        return self.pipe(ledger).largest()

    def staging(self, ledger: Ledger, after: Ledger) -> Staging:
        return self.pipe(ledger).staging(after)

    def trial_setting(self) -> Pipeline:
        """Pipedream is tried as 1f1b, whose stages compute a micro-batch alike; only the updates differ."""
        return self if not self.stashes else replace(self, schedule="1f1b", vertical=False, flush=type(self).flush)

    def line(self, run_of: Callable[[Mesh], Run]) -> StagesHere:
        return StagesHere([run_of(mesh) for mesh in mail_meshes(self.stages)])

    def pipe(self, ledger: Ledger) -> Pipe:
        return pipe_of(
            ledger, self.stages, self.pieces_wanted, self.schedule, self.chunks, self.balance, self.vertical, self.flush
        )

    def bounds(self, chain: Chain, sizes: Sequence[int]) -> list[range]:
        """The range of block calls in every chunk."""
        count = self.stages * self.chunks
        if len(chain.calls) < count:
            raise Mistake(
                f"Pipeline: the model calls {len(chain.calls)} blocks ({', '.join(chain.calls)}), and {count} stages need at "
                f"least one each: give fewer stages"
            )
        if self.chunks > 1 and chain.counts:
            raise Mistake(
                "Pipeline(schedule='interleaved'): every forward of the model changes something that it keeps outside of its "
                "blocks (a counter, say), and a worker runs the beginning of a forward once for each of its chunks: use another "
                "schedule, or do that inside of a block"
            )
        balance = self.balance or smallest_maximum(sizes, count)
        if sum(balance) != len(chain.calls):
            raise Mistake(
                f"Pipeline(balance={list(balance)}) has {sum(balance)} blocks, and the model calls {len(chain.calls)}: "
                f"{', '.join(chain.calls)}"
            )
        ends = [sum(balance[: number + 1]) for number in range(count)]
        for end in ends[:-1]:
            if end in chain.within:
                raise Mistake(
                    f"Pipeline: a stage begins with {chain.calls[end]}, which the model calls where no gradients are recorded "
                    f"(in a checkpoint with use_reentrant=True, say), and none would come back: call the checkpoint with "
                    f"use_reentrant=False or inside of the block, or cut elsewhere (balance=)"
                )
        return [range(end - size, end) for end, size in zip(ends, balance, strict=True)]

    def apply(self, run: Run) -> Run:
        link = run.team.mesh.along(self.unites)
        weights = {name: one.nbytes for name, one in run.model.named_parameters()}

        def bounds(chain: Chain) -> list[range]:
            found = self.bounds(chain, [sum(weights[name] for name in used) for used in chain.weights])
            played = set() if self.stashes else {f"{name}.{one}" for name in playable(run.model) for one in STATISTICS}
            check_kept(chain, found, played)
            return found

        stages = (
            PipeDream(run, link, bounds, self.pieces_wanted, self.flush, self.vertical)
            if self.stashes
            else Stages(run, link, bounds, self.orders, self.pieces_wanted)
        )

        # If another technique divides weights further (TensorParallel), outputs are divided too: then validation
        # gathers
        together = stages.together if run.outside.together is None else stages.usable

        def sum_and_wait(number: Tensor) -> None:
            run.held.summed(number)
            link.sum(number).wait()

        if isinstance(stages, PipeDream):  # weights were updated within the step already
            team = replace(run.team, synchronised=lambda: stages.due)
            run = replace(run, update=lambda now: None, team=team)
        return replace(
            run,
            blocks=stages.blocks,
            forward=stages.forward,
            gradients=stages.gradients,
            cuts=replace(run.cuts, parts=run.cuts.parts * self.pieces_wanted),
            outside=OutsideSteps(stages.usable, together, stages.evaluate),
            held=HeldWeights(
                sum_and_wait,
                lambda weight: run.held.share(weight) * stages.weights.counts_for(weight),
                run.held.elsewhere | stages.weights.elsewhere,
                {**run.held.shared, **stages.weights.sums_of_tied},
            ),
            state={**run.state, "stages": stages},
        )


def check_kept(chain: Chain, ranges: Sequence[range], played: Collection[str]) -> None:
    """Refuse blocks whose state calls in another stage or chunk would have to see. Statistics of batch norms that are
    `played` later are allowed, unless other code reads them."""
    for own in ranges:
        for call in own:
            for other in [other for other in range(len(chain.calls)) if other not in own]:
                outside = chain.buffers[other] - chain.keeping[other]
                if seen := chain.changing[call] & (chain.keeping[other].difference(played) | outside):
                    raise Mistake(
                        f"Pipeline: {chain.calls[call]} keeps something from call to call (in {min(seen)}), and "
                        f"{chain.calls[other]}, which another stage or chunk calls in the same forward, would not see that: put "
                        f"both into one stage (balance=), or let it keep nothing (a norm without running statistics)"
                    )


@cache
def known_orders(schedule: str, stages: int, pieces: int, chunks: int) -> Orders:
    return orders(schedule, stages, pieces, chunks)
