"""Tasks of training and measuring, and the table by which a worker process recognises its task.

The planner's tasks are in training/evidence/tasks.py, because the planner makes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from shoestring.core.costs.hardware import Hardware
from shoestring.core.workers.sum_costs import Rate
from shoestring.processes.messages import Closing
from shoestring.processes.task import GroupHistory, Task, Tell
from shoestring.training.evidence.tasks import (
    ROOM,
    AnchorTask,
    PiecesTask,
    RehearseTask,
    SampleTask,
    StagesTask,
    StepsTask,
    TrialTask,
)
from shoestring.training.execution.batch_sizes import ExpectedBatches
from shoestring.training.execution.recorder import RecordingSettings

if TYPE_CHECKING:
    from shoestring.core.workers.link import Link


@dataclass(frozen=True)
class TrainResult:
    """How training ended: finished, `stopped` on request, or `unsaved`."""

    steps: int = 0  # the last step of the run
    losses: tuple[float, ...] = ()  # of the steps done by this process
    state: Mapping[str, Any] = field(default_factory=dict)  # readable state of techniques, by name
    measured: Mapping[str, Any] = field(default_factory=dict)  # figures by name; of the whole run if there is a folder
    world: int = 1  # workers
    workers: tuple[Mapping[str, Any], ...] = ()  # per worker: peak_bytes, process_bytes, steps, sent
    weights_sha256: str = ""
    shown: str = ""  # the result of the job's `show` for the trained model
    stopped: int | None = None  # the last saved step; None: it was not asked to stop
    unsaved: str = ""  # why the last weights could not be saved
    restarts: int | None = None  # times that the group was formed again; None: no group
    recovery_seconds: tuple[float, ...] = ()  # from each death to the next step

    @property
    def unfinished(self) -> bool:
        return self.stopped is not None or bool(self.unsaved)


@dataclass(frozen=True, kw_only=True)
class TrainTask(StepsTask[TrainResult]):
    """Train the job, alone or as a worker of a group."""

    kind: ClassVar[str] = "train"
    result: ClassVar[type[Any]] = TrainResult
    resumes: ClassVar[bool] = True
    recording: RecordingSettings | None = None  # the run folder, from which it may resume; None: nothing is stored
    weights: str = ""  # a file for the trained weights
    expected: ExpectedBatches = field(default_factory=ExpectedBatches)  # expected batch sizes, from the plan

    @property
    def run_folder(self) -> str:
        return "" if self.recording is None else self.recording.folder

    def perform(self, tell: Tell, link: Link | None) -> TrainResult:
        from shoestring.training.execution import training

        return training.train(self, tell, link)

    def stop_result(self, step: int | None) -> TrainResult:
        return TrainResult(stopped=step)

    def in_group(self, result: TrainResult, group: GroupHistory) -> TrainResult:
        return replace(result, world=group.world, restarts=group.restarts, recovery_seconds=group.recovery_seconds)

    def closing(self, result: TrainResult) -> Closing:
        return Closing(result.unsaved, result.stopped)


@dataclass(frozen=True)
class LinkSpeed:
    ways: Mapping[str, tuple[Rate, ...]]  # all-reduce algorithms with the rates of their messages, by rising size
    memory: float  # bytes of the process that sending takes


@dataclass(frozen=True, kw_only=True)
class LinkSpeedTask(Task[LinkSpeed]):
    """Measure communication speed, together with the other workers that get the same store."""

    room: ClassVar[str] = ROOM
    kind: ClassVar[str] = "link speed"
    result: ClassVar[type[Any]] = LinkSpeed
    rank: int
    world: int
    same_machine: bool  # whether they share one machine's memory
    store: str  # a file through which they find each other

    def perform(self, tell: Tell, link: Link | None) -> LinkSpeed:
        from shoestring.training.execution import evidence

        return evidence.link_speed(self)


@dataclass(frozen=True)
class DoctorTask(Task[Hardware]):
    """Measure this machine."""

    room: ClassVar[str] = ROOM
    kind: ClassVar[str] = "doctor"
    result: ClassVar[type[Any]] = Hardware

    def perform(self, tell: Tell, link: Link | None) -> Hardware:
        from shoestring.training.execution import evidence

        return evidence.doctor(self)


TASKS: Mapping[str, type[Task[Any]]] = {
    one.kind: one
    for one in (
        TrainTask,
        TrialTask,
        AnchorTask,
        PiecesTask,
        StagesTask,
        SampleTask,
        RehearseTask,
        LinkSpeedTask,
        DoctorTask,
    )
}
