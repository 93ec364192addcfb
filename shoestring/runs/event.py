"""What can happen in a run, one frozen value a kind. `runs/events.py` writes and reads them, `runs/history.py` is what they come to.

A room brings kinds of its own (`RoomPlugin.events`).

In JSON an event is {"event": kind, "time": ..., its fields}. A field that a newer version added is ignored by an older reader; one that
a kind needs and lacks makes the event unusable, and it is skipped and counted. A kind that a newer version added is kept as it was told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from shoestring.core.staging import Work


def left_out(default: Any) -> Any:
    """A field that is not written while it has its default, because most runs have nothing to say there."""
    return field(default=default, metadata={"left out": True})


@dataclass(frozen=True)
class Event:
    """The base of all kinds; nobody instantiates it."""

    kind: ClassVar[str]
    time: float = field(default=0.0, kw_only=True)  # seconds since 1970; set when it is written


@dataclass(frozen=True)
class Planning(Event):
    """The planner is at work."""

    kind: ClassVar[str] = "planning"
    memory: int | None = None  # bytes of the budget


@dataclass(frozen=True, kw_only=True)
class Begun(Event):
    """Training begins, or goes on."""

    kind: ClassVar[str] = "begun"
    pid: int = 0  # of the process that trains; of a group, of its first worker
    steps: int  # that it is to take in all
    step: int  # the one it goes on from; 0: a new run
    how: str = ""  # where the data go on from
    world: int = left_out(1)  # workers


@dataclass(frozen=True)
class Stepped(Event):
    """A step is done."""

    kind: ClassVar[str] = "step"
    step: int
    loss: float
    seconds: float
    process: int  # bytes of the process now; of a group, of the largest
    most: int  # bytes at most so far
    moved: int | None = left_out(None)  # bytes to and from the disk in this step; None: it moves none
    sent: int | None = left_out(None)  # bytes sent to other workers; None: there are none
    epoch: int = left_out(0)  # rounds of the data that are over
    rate: float | None = left_out(
        None
    )  # learning rate of the step, of the first group of weights; None: there is no schedule
    norm: float | None = left_out(None)  # global norm of the gradients before they were clipped; None: they are not


@dataclass(frozen=True)
class Measured(Event):
    """What the tensors needed in the first two steps. Where workers do not wait for each other it comes at the end, of the largest."""

    kind: ClassVar[str] = "measured"
    peak_bytes: int
    flops: float = 0.0
    where: str = ""  # the moment of the peak
    parts: Mapping[str, int] = field(default_factory=dict)  # what it is made of
    process_bytes: int | None = left_out(None)  # of the largest worker, where they do not wait for each other
    sent_by_others_bytes: float | None = left_out(
        None
    )  # there, that each worker but the first sends in a step of its own


@dataclass(frozen=True)
class StageTimes(Event):
    """Who did what when in a step, of workers that hold different layers."""

    kind: ClassVar[str] = "timeline"
    step: int
    idle: float  # share of a step in which workers wait, the median
    steps: int  # of so many steps
    timeline: tuple[tuple[Work, ...], ...] = ()  # of every worker along the stages, of the first copy of the model
    peaks: tuple[int, ...] = ()  # bytes that the tensors of every worker needed at most so far
    machines: bool = left_out(False)  # they are on several, whose clocks are not one


@dataclass(frozen=True)
class Validated(Event):
    """The model was tried on held-out data."""

    kind: ClassVar[str] = "validated"
    step: int
    epoch: int = 0  # rounds of the data that were over
    metrics: Mapping[str, float | None] = field(
        default_factory=dict
    )  # by name, None: not a number; "loss" is the held-out one
    seconds: float = 0.0
    best: bool = False  # no validation before was as good, by the job's goal


@dataclass(frozen=True, kw_only=True)
class RoomEvent(Event):
    """The base of what a room tells of one step; told again after a resume, it stands in place of what was told before."""

    step: int

    @classmethod
    def measured(cls, told: Sequence[Any], seconds: Sequence[float], step_seconds: float) -> Mapping[str, float]:
        """The figures that such events come to, by name, with the seconds of all steps and of the median one."""
        return {}


@dataclass(frozen=True)
class Saved(Event):
    """A checkpoint is whole."""

    kind: ClassVar[str] = "saved"
    step: int
    checkpoint: str = ""  # its folder's name
    seconds: float = 0.0  # that training stood still
    bytes: int = 0
    best: bool = False


@dataclass(frozen=True)
class Warned(Event):
    kind: ClassVar[str] = "warning"
    text: str = ""


@dataclass(frozen=True)
class Adopted(Event):
    """The run goes on although what was asked for changed."""

    kind: ClassVar[str] = "adopted"
    differences: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stopped(Event):
    """It was asked to stop, and saved."""

    kind: ClassVar[str] = "stopped"
    step: int = left_out(0)  # the last one; 0: it was not asked but killed
    text: str = ""


DATA_ENDED = "data ended"  # why a run is over whose data ended before its steps; the same word as in course.py, which needs torch


@dataclass(frozen=True)
class Finished(Event):
    """Training is over and the last weights are saved."""

    kind: ClassVar[str] = "finished"
    step: int = 0
    ended: str = left_out("steps")  # why: "steps", "epochs", "data ended", "no better for 3 validations"
    epoch: int = left_out(0)  # rounds of the data that were over


@dataclass(frozen=True)
class Failed(Event):
    """It can't go on, and says why; a run that was killed says nothing."""

    kind: ClassVar[str] = "failed"
    text: str = ""


@dataclass(frozen=True)
class Died(Event):
    """A worker of a group died or stands still."""

    kind: ClassVar[str] = "died"
    rank: int = 0
    why: str = ""  # SIGKILL, exit code 1, no sign of life for 30 s
    step: int = 0
    text: str = ""


@dataclass(frozen=True)
class Reformed(Event):
    """The group goes on."""

    kind: ClassVar[str] = "re-formed"
    world: int = 1
    seconds: float = 0.0  # since the first of such deaths
    step: int = 0
    text: str = ""


@dataclass(frozen=True)
class Other(Event):
    """An event of a kind that this version does not know."""

    kind: ClassVar[str] = ""
    told: Mapping[str, Any] = field(default_factory=dict)  # as it stands in the file


KINDS: dict[str, type[Event]] = {  # of all rooms
    one.kind: one
    for one in (
        Planning,
        Begun,
        Stepped,
        Measured,
        StageTimes,
        Validated,
        Saved,
        Warned,
        Adopted,
        Stopped,
        Finished,
        Failed,
        Died,
        Reformed,
    )
}
