"""Tasks: what a worker process is asked to do. A room brings its own, and each says itself how it is done.

In JSON a task is {"room": name, "task": kind, its fields}. It comes to a worker by its standard input, and to other
machines of a group from node 0. The room is looked up among those that are installed and the kind in that room's table, so
what comes can't have anything imported. Fields that a task does not have are refused, because a misspelt one would silently
be a default.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from shoestring.core.codec import from_json, to_json
from shoestring.core.errors import Crashed, Mistake
from shoestring.core.rooms import room_named
from shoestring.processes.messages import NONSENSE, Closing
from shoestring.runs.event import Event

if TYPE_CHECKING:
    from shoestring.core.link import Link

R = TypeVar("R")
Tell = Callable[[Event], None]  # brings an event to the launcher


@dataclass(frozen=True)
class GroupHistory:
    """What only the launcher of a group knows of it."""

    world: int  # workers
    restarts: int  # times that the group was formed again
    recovery_seconds: tuple[float, ...] = ()  # from each death to the next step


@dataclass(frozen=True)
class GroupSeat:
    """Where a worker of a group finds the others."""

    rank: int
    world: int
    shares_memory: bool  # all workers are on this machine
    deadline: float  # seconds that a wait for other workers may take


class Task(ABC, Generic[R]):
    """The base of all tasks; R is the class of its result."""

    room: ClassVar[str]  # whose task it is
    kind: ClassVar[str]  # its name in JSON
    result: ClassVar[type[Any]]  # R, to read the result from JSON
    resumes: ClassVar[bool] = False  # done again by a group that was formed again, it goes on from a checkpoint

    @abstractmethod
    def perform(self, tell: Tell, link: Link | None) -> R:
        """Do it, in this process; `link` is to the other workers of a group."""

    @property
    def run_folder(self) -> str:
        """The run folder in which it is recorded, so that it can be stopped and gone on with; empty: nothing is kept."""
        return ""

    @property
    def techniques_used(self) -> tuple[str, ...]:
        """The names of the techniques it uses."""
        return ()

    def join(self, seat: GroupSeat) -> Link:
        """The link to the other workers of its group, whose process group of torch exists."""
        raise Crashed(f"a {self.kind} is nothing that a group can do")

    def stopped(self, step: int | None) -> R:
        """Its result when it was asked to stop, with the last step that is saved; None: it is done, and its result is on
        another machine."""
        raise Crashed(f"a {self.kind} is nothing that can be stopped")

    def in_group(self, result: R, group: GroupHistory) -> R:
        """Its result, with what only the launcher of the group knows."""
        return result

    def closing(self, result: R) -> Closing:
        """How node 0 tells the other machines what it came to."""
        return Closing()


@dataclass(frozen=True, kw_only=True)
class JobTask(Task[R]):
    """A task about a job, which is made again in the worker from its file."""

    file: str  # the job file
    flags: Mapping[str, Any] = field(default_factory=dict)  # that the job is made with
    traceback: bool = False  # the user wants to see where an error came from


class Worker(Protocol):
    """Whoever does tasks: in a child process, or in as many as will train; with these variables in their environment."""

    def __call__(self, task: Task[R], environment: Mapping[str, str], /) -> R: ...


def written_task(task: Task[Any]) -> str:
    """A task as text for a worker."""
    return json.dumps({"room": task.room, "task": task.kind} | to_json(task))


def read_task(text: str) -> Task[Any]:
    """The task that `written_task` wrote. Raises Mistake where it is none."""
    try:
        data = json.loads(text)
        room, kind = data.pop("room"), data.pop("task")
        return from_json(room_named(room).tasks()[kind], data)
    except Mistake:
        raise
    except NONSENSE as error:
        raise Mistake(f"what came is no task ({type(error).__name__}: {str(error)[:120]}): {text[:80]!r}") from error
