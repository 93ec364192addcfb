"""What worker processes say to their launcher, and machines to the one that leads: one frozen value a kind.

    Happened         something happened in the run (runs/event.py)
    Answer           the task is done; the last message
    Failure          it can't be done; the last message
    Heartbeat        the worker is alive
    WorkerJoined     the worker has found all others of its group
    PeerLostMessage  another worker can't be reached any more; the last message
    StopAsked        of a machine: its user wants the group to stop
    WorkerDied       of a machine: one of its workers ended or stands still

In JSON a message is {"message": kind, its fields}, one a line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from shoestring.core.codec import from_json, to_json
from shoestring.core.errors import Crashed, JobFailed, Mistake, NotRepeatable
from shoestring.runs.event import Event
from shoestring.runs.events import event_of, record_of, usable


class OutOfMemory(Mistake):
    """A worker ran out of memory, by its own word or by the kernel's."""


class Cause(Enum):
    """Whose failure it is, and so what the launcher raises."""

    MISTAKE = Mistake  # the user's: what was asked for, what the machine refuses
    NOT_REPEATABLE = NotRepeatable  # a block of the model can't be computed again
    JOB = JobFailed  # the user's too: code of the job failed
    FAULT = Crashed  # ours
    OUT_OF_MEMORY = OutOfMemory


class Message:
    kind: ClassVar[str]


@dataclass(frozen=True)
class Happened(Message):
    kind: ClassVar[str] = "happened"
    record: Mapping[str, Any]  # the event as JSON

    @property
    def event(self) -> Event:
        found = usable(dict(self.record))
        found = event_of(found) if isinstance(found, dict) else found
        if found is None:
            raise Mistake(f"a worker told of something that is no event: {str(self.record)[:80]}")
        return found


@dataclass(frozen=True)
class Answer(Message):
    kind: ClassVar[str] = "answer"
    result: Any  # as JSON; the task's `result` is its class


@dataclass(frozen=True)
class Failure(Message):
    kind: ClassVar[str] = "failure"
    cause: Cause
    text: str
    trace: str = ""  # where it came from, for who wants to see that

    @property
    def error(self) -> Exception:
        """What the launcher raises."""
        raised: type[Exception] = self.cause.value
        return raised(self.text)


@dataclass(frozen=True)
class Heartbeat(Message):
    kind: ClassVar[str] = "heartbeat"


@dataclass(frozen=True)
class WorkerJoined(Message):
    kind: ClassVar[str] = "joined"


@dataclass(frozen=True)
class PeerLostMessage(Message):
    kind: ClassVar[str] = "peer lost"
    text: str  # the first line of the error
    deadline: bool = False  # it was waited for until the deadline, and no connection broke


@dataclass(frozen=True)
class StopAsked(Message):
    kind: ClassVar[str] = "stop asked"


@dataclass(frozen=True)
class WorkerDied(Message):
    kind: ClassVar[str] = "worker died"
    rank: int
    why: str  # SIGKILL, exit code 3, no sign of life for 30 s
    meaning: str = ""  # what that may mean
    ago: float = 0.0  # seconds
    round: int = 0  # of the group, in which it was

    def __str__(self) -> str:
        return f"worker {self.rank} died ({self.why})"


KINDS: Mapping[str, type[Message]] = {
    one.kind: one
    for one in (Happened, Answer, Failure, Heartbeat, WorkerJoined, PeerLostMessage, StopAsked, WorkerDied)
}

Send = Callable[[Message], None]
NONSENSE = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
)  # what reading JSON raises that says what can't be


def happened(event: Event) -> Happened:
    return Happened(record_of(event))


def written_message(message: Message) -> str:
    """
    >>> read_message(written_message(PeerLostMessage("connection reset")))
    PeerLostMessage(text='connection reset', deadline=False)
    """
    return json.dumps({"message": message.kind} | to_json(message))


def read_message(text: str | bytes) -> Message:
    try:
        data = json.loads(text)
        return from_json(KINDS[data.pop("message")], data)
    except NONSENSE as error:
        raise Mistake(
            f"a worker, or another machine, said what is no message ({type(error).__name__}): {text[:80]!r}"
        ) from error


@dataclass(frozen=True)
class Closing:
    """How node 0 says that a group of machines is over: it is done, unless one of these says other."""

    failure: str = ""  # why it failed
    stopped: int | None = None  # the last step that is saved; None: it was not asked to stop
