"""Tasks of training and measuring, and the table of all tasks by which a worker process knows what it was sent.

Those of planning are in training/evidence/tasks.py, because the planner makes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from shoestring.core.codec import from_json, to_json
from shoestring.core.errors import Mistake
from shoestring.core.hardware import Hardware
from shoestring.core.sums import Rate
from shoestring.processes.messages import NONSENSE
from shoestring.training.evidence.tasks import (
    AnchorTask,
    JobTask,
    PiecesTask,
    RehearseTask,
    SampleTask,
    StagesTask,
    Task,
    TrialTask,
)
from shoestring.training.execution.batch_sizes import ExpectedBatches
from shoestring.training.execution.recorder import RecordingSettings


@dataclass(frozen=True)
class TrainResult:
    """How training ended: done, `stopped` because somebody asked for it, or `unsaved`."""

    steps: int = 0  # that the run stands at
    losses: tuple[float, ...] = ()  # of the steps that this process did
    state: Mapping[str, Any] = field(default_factory=dict)  # what techniques say of their course, by part
    measured: Mapping[str, Any] = field(
        default_factory=dict
    )  # figures by name; where there is a folder, of the whole run
    world: int = 1  # workers
    workers: tuple[Mapping[str, Any], ...] = ()  # of every worker: peak_bytes, process_bytes, steps, sent
    weights_sha256: str = ""
    shown: str = ""  # what the job's `show` said of the trained model
    stopped: int | None = None  # the last step that is saved; None: it was not asked to stop
    unsaved: str = ""  # why the last weights could not be saved
    restarts: int | None = None  # times that the group was formed again; None: there is no group
    recovery_seconds: tuple[float, ...] = ()  # from each death to the next step


@dataclass(frozen=True, kw_only=True)
class TrainTask(JobTask[TrainResult]):
    """Train the job, alone or as a worker of a group."""

    kind: ClassVar[str] = "train"
    result: ClassVar[type[Any]] = TrainResult
    recording: RecordingSettings | None = None  # the run folder, where it may go on from; None: nothing is kept
    weights: str = ""  # a file to write the trained weights to
    expected: ExpectedBatches = field(default_factory=ExpectedBatches)  # of the batches, by the plan


@dataclass(frozen=True)
class LinkSpeed:
    ways: Mapping[str, tuple[Rate, ...]]  # to add up, and what messages take in each, by rising size
    memory: float  # bytes that sending takes of the process


@dataclass(frozen=True, kw_only=True)
class LinkSpeedTask(Task[LinkSpeed]):
    """Measure, with the other workers that are given the same store, how fast they can talk."""

    kind: ClassVar[str] = "link speed"
    result: ClassVar[type[Any]] = LinkSpeed
    rank: int
    world: int
    same_machine: bool  # they share one machine's memory
    store: str  # a file by which they find each other


@dataclass(frozen=True)
class DoctorTask(Task[Hardware]):
    """Measure this machine."""

    kind: ClassVar[str] = "doctor"
    result: ClassVar[type[Any]] = Hardware


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


def written_task(task: Task[Any]) -> str:
    """A task as text for a worker: {"task": kind, its fields}."""
    return json.dumps({"task": task.kind} | to_json(task))


def read_task(text: str) -> Task[Any]:
    """
    >>> read_task(written_task(DoctorTask()))
    DoctorTask()
    """
    try:
        data = json.loads(text)
        return from_json(TASKS[data.pop("task")], data)
    except NONSENSE as error:
        raise Mistake(f"what came is no task ({type(error).__name__}: {str(error)[:120]}): {text[:80]!r}") from error
