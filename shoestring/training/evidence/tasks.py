"""Tasks by which the planner asks worker processes about a job: one frozen dataclass per question, with the class of
its result.

`training/execution/tasks.py` has the tasks of training, and the table of all tasks of this room. The code of a task is
imported when it is performed, because unneeded imports would count as memory of the process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from shoestring.core.technique import in_order, technique_from, technique_json
from shoestring.core.workers.sum_costs import Speeds
from shoestring.measure.tracker import Log
from shoestring.processes.task import GroupSeat, JobTask, R, Tell
from shoestring.training.catalogue import CATALOGUE
from shoestring.training.technique import TrainingTechnique

if TYPE_CHECKING:
    from shoestring.core.workers.link import Link

ROOM = "training"


@dataclass(frozen=True)
class TechniqueSpec:
    """A technique by name, as written; a process that can't make it can still pass it on."""

    name: str
    knobs: Mapping[str, Any] = field(default_factory=dict)


def specs_of(techniques: Iterable[TrainingTechnique]) -> tuple[TechniqueSpec, ...]:
    return tuple(TechniqueSpec(**technique_json(one)) for one in techniques)


def techniques_of(specs: Iterable[TechniqueSpec]) -> tuple[TrainingTechnique, ...]:
    """The techniques, in the order in which they are applied."""
    return in_order(technique_from(one.name, one.knobs, CATALOGUE) for one in specs)


@dataclass(frozen=True)
class Position:
    """A worker's position in an imagined group: its rank, the number of workers, and whether all share one machine's
    memory.

    The speeds, by which all-reduce algorithms are chosen, are those of a real group.
    """

    rank: int = 0
    world: int = 1
    same_machine: bool = False
    per_copy: int = (
        1  # workers that get the same samples, if no technique says so: batches have too few samples for all
    )
    speeds: Speeds | None = None


@dataclass(frozen=True, kw_only=True)
class StepsTask(JobTask[R]):
    """Fields shared by tasks that run steps of a job, or parts of steps."""

    room: ClassVar[str] = ROOM
    techniques: tuple[TechniqueSpec, ...] = ()
    steps: int | None = None  # steps to train; None: as many as the job says
    position: Position = Position()
    largest: tuple[int, ...] = ()  # numbers of the batches to plan for; empty: as the job says

    @property
    def techniques_used(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.techniques)

    def join(self, seat: GroupSeat) -> Link:
        from shoestring.training.links.shared_memory_link import join_link

        return join_link(seat.rank, seat.world, seat.shares_memory, seat.deadline, speeds=self.position.speeds)


@dataclass(frozen=True)
class AnchorStep:
    """The measurements of a real step under some techniques. Values that were not requested, or could not be measured,
    have their default."""

    times: Mapping[str, float] = field(default_factory=dict)  # seconds by "phase place"; "step": the whole step
    process: int = 0  # peak bytes of the process
    reserved: int = 0  # bytes of address space above that
    paces: tuple[tuple[float, float], ...] = ()  # (n, time in n micro-batches / time at once)
    adding: float = 0.0  # seconds to add all gradients to others
    probes: Mapping[str, float] = field(default_factory=dict)  # seconds of techniques' probes, by their name
    overheads: Mapping[str, int] = field(
        default_factory=dict
    )  # bytes of the process above its tensors, by "phase place"
    filled: float = 1.0  # fraction of libraries' workspaces that is written to
    validation_seconds: float = 0.0  # the job's own validation, if it has one
    validation_bytes: int = 0  # peak bytes of its tensors
    error: str = ""  # why the step failed; then nothing else is known
    spread: float = 0.0  # mean deviation of steps from the median, relative to it
    busy: float = 0.0  # fraction of the time that other processes took from even the best step


@dataclass(frozen=True)
class AnchorResult:
    steps: Mapping[str, AnchorStep]  # by the name of the variant
    pieces: Mapping[str, str] = field(
        default_factory=dict
    )  # what a batch in two pieces changes: trait -> what was found
    again: str = ""  # why blocks can't be computed again; empty: they can
    waiting: float = 0.0  # seconds that the first step waits for its batch

    @property
    def held_up(self) -> float:
        return max(one.busy for one in self.steps.values())


@dataclass(frozen=True, kw_only=True)
class AnchorTask(StepsTask[AnchorResult]):
    """Measure one real step under each of several variants: its time, or where its memory goes."""

    kind: ClassVar[str] = "anchor"
    result: ClassVar[type[Any]] = AnchorResult
    variants: Mapping[str, tuple[TechniqueSpec, ...]]  # techniques by variant; "": the step that must work
    memory: bool = False  # measure memory instead of time
    pieces: bool = True  # with the time: try whether two micro-batches give the same result
    alone: bool = False  # time the step and nothing that only techniques' figures are made of
    typical: int | None = None  # number of the batch to time; None: the one that is measured for memory

    def perform(self, tell: Tell, link: Link | None) -> AnchorResult:
        from shoestring.training.execution import evidence

        return evidence.anchor(self)


@dataclass(frozen=True)
class PiecesResult:
    found: Mapping[str, str]  # trait of the model -> observation


@dataclass(frozen=True, kw_only=True)
class PiecesTask(StepsTask[PiecesResult]):
    """Try whether a batch in two micro-batches gives the same numbers as the batch at once."""

    kind: ClassVar[str] = "pieces"
    result: ClassVar[type[Any]] = PiecesResult
    small: bool = False  # use a few samples, because a step takes long

    def perform(self, tell: Tell, link: Link | None) -> PiecesResult:
        from shoestring.training.execution import evidence

        return evidence.pieces(self)


@dataclass(frozen=True)
class StagesResult:
    difference: str = ""  # between stages and one process; empty if none was found
    untried: str = ""  # why it was not tried


@dataclass(frozen=True, kw_only=True)
class StagesTask(StepsTask[StagesResult]):
    """Try whether the stages of a technique compute the same numbers as one process."""

    kind: ClassVar[str] = "stages"
    result: ClassVar[type[Any]] = StagesResult

    def perform(self, tell: Tell, link: Link | None) -> StagesResult:
        from shoestring.training.execution import evidence

        if link is not None and link.rank > 0:  # one worker is enough
            return StagesResult()
        return evidence.stages(self)


@dataclass(frozen=True)
class SampleResult:
    blocks: Mapping[str, tuple[float, float]]  # seconds forward and backward, by the block's name
    update: float  # seconds per byte of weights
    fused: float  # the same with fused kernels
    overhead: int  # bytes of the process above its tensors
    reserved: int  # bytes of address space above that
    held_up: float = 0.0  # fraction of the time that other processes took from even the best pass


@dataclass(frozen=True, kw_only=True)
class SampleTask(StepsTask[SampleResult]):
    """Time one block of each kind, for a model that is too large for a whole step."""

    kind: ClassVar[str] = "sample"
    result: ClassVar[type[Any]] = SampleResult

    def perform(self, tell: Tell, link: Link | None) -> SampleResult:
        from shoestring.training.execution import evidence

        return evidence.sample(self)


@dataclass(frozen=True, kw_only=True)
class RehearseTask(StepsTask[Log]):
    """Log real steps, for a model that can't run on fake tensors."""

    kind: ClassVar[str] = "rehearse"
    result: ClassVar[type[Any]] = Log

    def perform(self, tell: Tell, link: Link | None) -> Log:
        from shoestring.training.execution import evidence

        return evidence.rehearse(self)


@dataclass(frozen=True)
class TrialResult:
    process_bytes: int  # the largest process of any worker
    step_seconds: float  # the median step
    steps: int  # number of steps done


@dataclass(frozen=True, kw_only=True)
class TrialTask(StepsTask[TrialResult]):
    """Run a few real steps to see how large the process grows."""

    kind: ClassVar[str] = "trial"
    result: ClassVar[type[Any]] = TrialResult
    tracked: bool = True  # False: without inspecting the model, which failed
    together: bool = False  # by all workers of the group, instead of one worker alone

    def perform(self, tell: Tell, link: Link | None) -> TrialResult:
        from shoestring.training.execution import training

        return training.trial(self, tell, link)
