"""What can happen in a run, one frozen value a kind. `runs/events.py` writes and reads them, `runs/report.py` is what they come to.

In JSON an event is {"event": kind, "time": ..., its fields}. A field that a newer version added is ignored by an older reader; one that
a kind needs and lacks makes the event unusable, and it is skipped and counted.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True)
class Event:
    """The base of all kinds; nobody instantiates it."""

    kind: ClassVar[str]
    time: float = field(default=0.0, kw_only=True)   # seconds since 1970; set when it is written


@dataclass(frozen=True)
class Planning(Event):
    """The planner is at work."""

    kind: ClassVar[str] = "planning"
    memory: int | None = None    # bytes of the budget


@dataclass(frozen=True)
class Begun(Event):
    """Training begins, or goes on."""

    kind: ClassVar[str] = "begun"
    steps: int                   # that it is to take in all
    step: int                    # the one it goes on from; 0: a new run
    pid: int = 0
    how: str = ""                # where the data go on from
    world: int = 1               # workers


@dataclass(frozen=True)
class Stepped(Event):
    """A step is done."""

    kind: ClassVar[str] = "step"
    step: int
    loss: float
    seconds: float
    process: int                 # bytes of the process now; of a group, of the largest
    most: int                    # bytes at most so far
    moved: int | None = None     # bytes to and from the disk in this step; None: it moves none
    sent: int | None = None      # bytes sent to other workers


@dataclass(frozen=True)
class Measured(Event):
    """What the tensors needed in the first two steps, and where workers do not wait for each other, what each of them measured."""

    kind: ClassVar[str] = "measured"
    peak_bytes: int
    flops: float = 0.0
    where: str = ""                                             # the moment of the peak
    parts: Mapping[str, int] = field(default_factory=dict)      # what it is made of
    process_bytes: int | None = None
    sent_by_others_bytes: float | None = None
    workers: tuple[Mapping[str, Any], ...] = ()                 # of every worker: peak_bytes, process_bytes, steps, sent


@dataclass(frozen=True)
class Saved(Event):
    """A checkpoint is whole."""

    kind: ClassVar[str] = "saved"
    step: int
    checkpoint: str = ""         # its folder's name
    seconds: float = 0.0         # that training stood still
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
    step: int = 0
    text: str = ""


@dataclass(frozen=True)
class Finished(Event):
    """All steps are done and the last weights are saved."""

    kind: ClassVar[str] = "finished"
    step: int = 0


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
    why: str = ""                # SIGKILL, exit code 1, no sign of life for 30 s
    step: int = 0
    text: str = ""


@dataclass(frozen=True)
class Reformed(Event):
    """The group goes on."""

    kind: ClassVar[str] = "re-formed"
    world: int = 1
    seconds: float = 0.0         # since the first of such deaths
    step: int = 0
    text: str = ""


KINDS: dict[str, type[Event]] = {one.kind: one for one in (
    Planning, Begun, Stepped, Measured, Saved, Warned, Adopted, Stopped, Finished, Failed, Died, Reformed)}
