"""Tasks: what a worker process is asked to do. A room brings its own kinds, and each knows how it is done.

In JSON a task is {"room": name, "task": kind, its fields}. A worker reads it from standard input; other machines of a
group get it from node 0. The room is looked up among the installed ones and the kind in that room's table, so a task
can't cause any other import. Unknown fields are refused, because a misspelt one would silently be a default.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from shoestring.core.errors import Crashed, Mistake
from shoestring.core.files.codec import from_json, to_json
from shoestring.core.rooms import room_named
from shoestring.processes.messages import NONSENSE, Closing
from shoestring.runs.events.event import Event

if TYPE_CHECKING:
    from shoestring.core.workers.link import Link

R = TypeVar("R")
Tell = Callable[[Event], None]  # sends an event to the launcher


@dataclass(frozen=True)
class GroupHistory:
    """What only a group's launcher knows about it."""

    world: int  # workers
    restarts: int  # number of times the group was formed again
    recovery_seconds: tuple[float, ...] = ()  # from each death to the next step


@dataclass(frozen=True)
class GroupSeat:
    """Where a worker of a group finds the others."""

    rank: int
    world: int
    shares_memory: bool  # whether all workers are on this machine
    deadline: float  # longest wait for other workers, in seconds


class Task(ABC, Generic[R]):
    """Base class of all tasks; R is the class of the result."""

    room: ClassVar[str]  # the room it belongs to
    kind: ClassVar[str]  # its name in JSON
    result: ClassVar[type[Any]]  # R, needed to read the result from JSON
    resumes: ClassVar[bool] = False  # whether it continues from a checkpoint when a restarted group does it again

    @abstractmethod
    def perform(self, tell: Tell, link: Link | None) -> R:
        """Do the task in this process; `link` leads to the other workers of a group."""

    @property
    def run_folder(self) -> str:
        """The run folder in which it is recorded, so it can be stopped and resumed; empty: nothing is stored."""
        return ""

    @property
    def techniques_used(self) -> tuple[str, ...]:
        """The names of the techniques that it uses."""
        return ()

    def join(self, seat: GroupSeat) -> Link:
        """The link to the other workers of its group; torch's process group exists already."""
        raise Crashed(f"a {self.kind} is nothing that a group can do")

    def stop_result(self, step: int | None) -> R:
        """The result if it was asked to stop, given the last saved step; None: it is done, and its result is on another
        machine."""
        raise Crashed(f"a {self.kind} is nothing that can be stopped")

    def in_group(self, result: R, group: GroupHistory) -> R:
        """The result, completed by what only the group's launcher knows."""
        return result

    def closing(self, result: R) -> Closing:
        """Node 0's message to the other machines about this result."""
        return Closing()


@dataclass(frozen=True, kw_only=True)
class JobTask(Task[R]):
    """A task about a job, which the worker makes again from its file."""

    file: str  # the job file
    flags: Mapping[str, Any] = field(default_factory=dict)  # flags of the job
    traceback: bool = False  # whether the user wants tracebacks


class Worker(Protocol):
    """Runs tasks: in a child process, or in several that train together; with these environment variables."""

    def __call__(self, task: Task[R], environment: Mapping[str, str], /) -> R: ...


def task_text(task: Task[Any]) -> str:
    """A task as text for a worker."""
    return json.dumps({"room": task.room, "task": task.kind} | to_json(task))


def read_task(text: str) -> Task[Any]:
    """The task in text from `task_text`. Raises Mistake if it is none."""
    try:
        data = json.loads(text)
        room, kind = data.pop("room"), data.pop("task")
        return from_json(room_named(room).tasks()[kind], data)
    except Mistake:
        raise
    except NONSENSE as error:
        raise Mistake(f"the message is no task ({type(error).__name__}: {str(error)[:120]}): {text[:80]!r}") from error
