"""Messages from worker processes to their launcher, and from machines to node 0: one frozen dataclass per kind.

    Happened         an event of the run (runs/events/event.py)
    Answer           the task is done; the last message
    Failure          the task failed; the last message
    Heartbeat        the worker is alive
    WorkerJoined     the worker has found all others of its group
    PeerLostMessage  another worker can't be reached any more; the last message
    StopAsked        from a machine: its user wants the group to stop
    WorkerDied       from a machine: one of its workers ended or hangs

In JSON a message is {"message": kind, its fields}, one per line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from shoestring.core.errors import Crashed, JobFailed, Mistake, NotRepeatable
from shoestring.core.files.codec import from_json, to_json
from shoestring.runs.events.event import Event
from shoestring.runs.events.event_log import event_of, record_of, usable


class OutOfMemory(Mistake):
    """A worker ran out of memory, as reported by itself or the kernel."""


class Cause(Enum):
    """Whose failure it is, and therefore which error the launcher raises."""

    MISTAKE = Mistake  # the user's: an impossible request, or the machine refuses
    NOT_REPEATABLE = NotRepeatable  # a block of the model can't be recomputed
    JOB = JobFailed  # the user's too: the job's code failed
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
            raise Mistake(f"a worker reported something that is no event: {str(self.record)[:80]}")
        return found


@dataclass(frozen=True)
class Answer(Message):
    kind: ClassVar[str] = "answer"
    result: Any  # as JSON; its class is the task's `result`


@dataclass(frozen=True)
class Failure(Message):
    kind: ClassVar[str] = "failure"
    cause: Cause
    text: str
    trace: str = ""  # the traceback, for users who want it

    @property
    def error(self) -> Exception:
        """The error that the launcher raises."""
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
    deadline: bool = False  # the wait reached its deadline; no connection broke


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
    round: int = 0  # the group's round in which it happened

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
)  # errors raised by reading JSON with impossible content


def event_message(event: Event) -> Happened:
    return Happened(record_of(event))


def message_text(message: Message) -> str:
    """
    >>> read_message(message_text(PeerLostMessage("connection reset")))
    PeerLostMessage(text='connection reset', deadline=False)
    """
    return json.dumps({"message": message.kind} | to_json(message))


def read_message(text: str | bytes) -> Message:
    try:
        data = json.loads(text)
        return from_json(KINDS[data.pop("message")], data)
    except NONSENSE as error:
        raise Mistake(
            f"an unreadable message came from a worker or another machine ({type(error).__name__}): {text[:80]!r}"
        ) from error


@dataclass(frozen=True)
class Closing:
    """Node 0's message that a group of machines is over: successfully, unless one of these fields is set."""

    failure: str = ""  # why it failed
    stopped: int | None = None  # the last saved step; None: it was not asked to stop
