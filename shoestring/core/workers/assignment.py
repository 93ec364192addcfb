"""The assignment: which part of which batch a worker trains on next. The feed asks it.

Every computing worker gets one part of every batch, unless a technique distributes work otherwise: asynchronous workers
take the next part from a queue when they are free, so one may get several parts of a batch, or none.

Contract: In an asynchronous group nobody waits for all: only the first worker counts steps, keeps and saves, and it
ends the others by `GroupDone` (tests/training/data_parallel/parameter_server/test_asynchronous.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Protocol

from shoestring.core.workers.mesh import Mesh


class Batches(Protocol):
    """The interface of the feed that an assignment uses."""

    taken: int  # batches consumed so far

    def part(
        self, number: int, part: int | None
    ) -> Any: ...  # advances to the batch with this number; returns a part of it, or nothing for None


class Assignment(ABC):
    asynchronous: ClassVar[bool] = (
        False  # whether workers do not wait for each other; then nothing is done jointly during training
    )
    parts: int  # number of parts that a batch is cut into
    idle: bool = False  # set by the feed: this worker's part is empty, because the batch has fewer samples than parts

    @abstractmethod
    def next(self, feed: Batches) -> tuple[int, int | None]:
        """The number of the next batch, and this worker's part of it; None: no part."""

    @property
    def counts_steps(self) -> bool:
        """Whether this worker's steps are those of the run."""
        return True

    def steps_done(self, own: int, before: int) -> int:
        """Steps of the run that are done when this worker begins another; `own`: its own steps, `before`: the run's
        when it was resumed."""
        return own

    @abstractmethod
    def end(self) -> None:
        """This worker has done its last step. Asynchronous workers wait here until all have."""


class OwnPart(Assignment):
    """The same part of every batch."""

    def __init__(self, part: int = 0, parts: int = 1) -> None:
        self.number, self.parts = part, parts

    def next(self, feed: Batches) -> tuple[int, int | None]:
        return feed.taken, self.number

    def end(self) -> None:
        """Nothing to wait for: all workers have done the same steps."""


def own_part(mesh: Mesh) -> OwnPart:
    """The part for a worker of this mesh: batches are divided along its data axis."""
    link = mesh.along("data")
    return OwnPart(link.rank, link.world)
