"""The events of a run, one frozen dataclass per kind. `runs/events/event_log.py` writes and reads them, `runs/events/history.py` folds
them.

A room adds kinds of its own (`RoomPlugin.events`).

In JSON an event is {"event": kind, "time": ..., its fields}. Readers ignore fields that they do not know. An event
without a required field is skipped and counted. An event of an unknown kind, from a newer version, is kept as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from shoestring.core.workers.staging import Work


def left_out(default: Any) -> Any:
    """A field that is not written while it has its default, to keep the file small."""
    return field(default=default, metadata={"left out": True})


@dataclass(frozen=True)
class Event:
    """The base class of all kinds."""

    kind: ClassVar[str]
    time: float = field(default=0.0, kw_only=True)  # seconds since 1970; set when the event is written

    def sentence(self) -> str:
        """What a room's event says in the list of events; empty: it is not listed."""
        return ""


@dataclass(frozen=True)
class Planning(Event):
    """The planner is working."""

    kind: ClassVar[str] = "planning"
    memory: int | None = None  # bytes of the budget


@dataclass(frozen=True, kw_only=True)
class Begun(Event):
    """Training starts or resumes."""

    kind: ClassVar[str] = "begun"
    pid: int = 0  # the training process; in a group, the first worker
    steps: int  # total number of steps planned
    step: int  # the step it resumes from; 0: a new run
    how: str = ""  # the position in the data that it resumes from
    world: int = left_out(1)  # workers
    together: int = left_out(1)  # batches that come at once: one from each process that loads data


@dataclass(frozen=True)
class Stepped(Event):
    """A step was done."""

    kind: ClassVar[str] = "step"
    step: int
    loss: float
    seconds: float
    process: int  # bytes of the process now; in a group, of the largest worker
    most: int  # the peak so far
    moved: int | None = left_out(None)  # bytes to and from the disk in this step; None: none are moved
    sent: int | None = left_out(None)  # bytes sent to other workers; None: there are none
    epoch: int = left_out(0)  # completed epochs
    rate: float | None = left_out(None)  # learning rate of the first parameter group in this step; None: no schedule
    norm: float | None = left_out(None)  # global norm of the gradients before clipping; None: no clipping
    # fraction of their runnable time that threads had no core since the last step that has it; None: not looked
    held_up: float | None = left_out(None)


@dataclass(frozen=True)
class Measured(Event):
    """Peak tensor memory of the first two steps. In asynchronous groups it comes at the end and is the largest
    worker's."""

    kind: ClassVar[str] = "measured"
    peak_bytes: int
    flops: float = 0.0
    where: str = ""  # the moment of the peak
    parts: Mapping[str, int] = field(default_factory=dict)  # bytes by what holds them
    process_bytes: int | None = left_out(None)  # of the largest worker; asynchronous groups only
    sent_by_others_bytes: float | None = left_out(
        None
    )  # bytes that each worker but the first sends in one of its steps; asynchronous groups only


@dataclass(frozen=True)
class StageTimes(Event):
    """The measured timeline of a step whose workers hold different layers."""

    kind: ClassVar[str] = "timeline"
    step: int
    idle: float  # median fraction of a step that workers wait
    steps: int  # number of steps measured
    timeline: tuple[tuple[Work, ...], ...] = ()  # one row per worker along the stages, of the first replica
    peaks: tuple[int, ...] = ()  # peak tensor bytes of every worker so far
    machines: bool = left_out(False)  # workers are on several machines, whose clocks differ


@dataclass(frozen=True)
class Validated(Event):
    """The model was evaluated on held-out data."""

    kind: ClassVar[str] = "validated"
    step: int
    epoch: int = 0  # completed epochs
    metrics: Mapping[str, float | None] = field(
        default_factory=dict
    )  # metrics by name; None: NaN or infinite; "loss" is the held-out loss
    seconds: float = 0.0
    best: bool = False  # better than all before, by the job's goal


@dataclass(frozen=True, kw_only=True)
class RoomEvent(Event):
    """Base class of a room's events about one step. After a resume, a new event about the same step replaces the old
    one."""

    step: int

    @classmethod
    def measured_figures(
        cls, told: Sequence[Any], seconds: Sequence[float], step_seconds: float
    ) -> Mapping[str, float]:
        """The figures computed from such events, by name; given the seconds of all steps and of the median step."""
        return {}


@dataclass(frozen=True)
class Saved(Event):
    """A checkpoint is complete."""

    kind: ClassVar[str] = "saved"
    step: int
    checkpoint: str = ""  # name of its folder
    seconds: float = 0.0  # time that training was paused
    bytes: int = 0
    best: bool = False


@dataclass(frozen=True)
class Warned(Event):
    kind: ClassVar[str] = "warning"
    text: str = ""


@dataclass(frozen=True)
class Adopted(Event):
    """The run continues although the request changed."""

    kind: ClassVar[str] = "adopted"
    differences: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stopped(Event):
    """The run was asked to stop, and saved."""

    kind: ClassVar[str] = "stopped"
    step: int = left_out(0)  # the last step; 0: it was killed instead
    text: str = ""


DATA_ENDED = "data ended"  # why a run ended whose data ran out before its steps; the same text as in progress.py, which needs torch


@dataclass(frozen=True)
class Finished(Event):
    """Training is over and the last weights are saved."""

    kind: ClassVar[str] = "finished"
    step: int = 0
    ended: str = left_out("steps")  # the reason: "steps", "epochs", "data ended", "no better for 3 validations"
    epoch: int = left_out(0)  # completed epochs


@dataclass(frozen=True)
class Failed(Event):
    """The run failed and says why; a killed run leaves no such event."""

    kind: ClassVar[str] = "failed"
    text: str = ""


@dataclass(frozen=True)
class Died(Event):
    """A worker of a group died or hangs."""

    kind: ClassVar[str] = "died"
    rank: int = 0
    why: str = ""  # SIGKILL, exit code 1, no sign of life for 30 s
    step: int = 0
    text: str = ""


@dataclass(frozen=True)
class Reformed(Event):
    """The group continues after workers were replaced."""

    kind: ClassVar[str] = "re-formed"
    world: int = 1
    seconds: float = 0.0  # since the first of these deaths
    step: int = 0
    text: str = ""


@dataclass(frozen=True)
class Other(Event):
    """An event of a kind that this version does not know."""

    kind: ClassVar[str] = ""
    told: Mapping[str, Any] = field(default_factory=dict)  # the whole JSON object


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
