"""The queue: every accepted request whose answer is not there yet, waiting or in a batch.

    put -> waiting -> take -> in a batch -> done
              ^                   |
              +---- give_back ----+        the replica died

A request whose replica died waits again with the time it arrived, and is computed alone, so that a request that kills replicas
takes no other with it. One that has killed two replicas while it was alone is given up.

Nothing here looks at a clock.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from shoestring.serving.batching.policy import Batching, Waiting, next_batch

T = TypeVar("T")
TRIES = 2  # replicas that a request may kill while it is alone in its batch


@dataclass(eq=False)
class Queued(Generic[T]):
    """A request in the queue."""

    item: T
    waiting: Waiting
    number: int  # in the order in which they were accepted
    suspect: bool = False  # a replica died while it computed this one
    kills: int = 0  # replicas that died while they computed this one alone
    withdrawn: bool = False  # nobody wants the answer any more

    @property
    def rank(self) -> tuple[float, float, int]:
        return -self.waiting.urgency, self.waiting.arrived, self.number


@dataclass(frozen=True, eq=False)
class QueuedBatch(Generic[T]):
    """Requests that one replica computes together."""

    number: int
    requests: Sequence[Queued[T]]

    @property
    def rows(self) -> int:
        return len(self.requests)

    @property
    def tokens(self) -> int:
        """The sum of their lengths, without padding."""
        return sum(one.waiting.length for one in self.requests)


@dataclass
class RequestQueue(Generic[T]):
    how: Batching
    line: list[Queued[T]] = field(default_factory=list)  # those that wait, most urgent and oldest first
    running: dict[int, QueuedBatch[T]] = field(default_factory=dict)
    accepted: int = 0
    batches: int = 0
    tokens: int = 0  # sum of the lengths of those that wait

    def __len__(self) -> int:
        """How many wait."""
        return len(self.line)

    @property
    def is_empty(self) -> bool:
        """Whether every request has its answer."""
        return not self.line and not self.running

    def put(self, item: T, waiting: Waiting) -> Queued[T]:
        self.accepted += 1
        one = Queued(item, waiting, self.accepted)
        self.wait(one)
        return one

    def wait(self, one: Queued[T]) -> None:
        insort(self.line, one, key=lambda other: other.rank)
        self.tokens += one.waiting.length

    def remove(self, found: set[int]) -> None:
        """Take requests, by number, out of the line."""
        self.tokens -= sum(one.waiting.length for one in self.line if one.number in found)
        self.line = [one for one in self.line if one.number not in found]

    def take(self, now: float) -> QueuedBatch[T] | None:
        """The next batch; None if nobody waits whose deadline is not over."""
        alive = [one for one in self.line if one.waiting.deadline >= now]
        if not alive:
            return None
        if alive[0].suspect:
            chosen = alive[:1]
        else:
            usual = [one for one in alive if not one.suspect]
            chosen = [usual[place] for place in next_batch([one.waiting for one in usual], self.how, now)]
        self.remove({one.number for one in chosen})
        self.batches += 1
        batch = self.running[self.batches] = QueuedBatch(self.batches, tuple(chosen))
        return batch

    def forget(self, batch: QueuedBatch[T]) -> None:
        del self.running[batch.number]

    def give_back(self, batch: QueuedBatch[T]) -> list[Queued[T]]:
        """Let a batch wait again whose replica died; gives those that are given up."""
        self.forget(batch)
        given_up = []
        for one in batch.requests:
            one.suspect, one.kills = True, one.kills + (batch.rows == 1)
            if one.withdrawn:
                continue
            if one.kills >= TRIES:
                given_up.append(one)
            else:
                self.wait(one)
        return given_up

    def withdraw(self, one: Queued[T]) -> None:
        """Forget a request: it leaves the line, or its answer is not wanted."""
        one.withdrawn = True
        if any(other is one for other in self.line):
            self.remove({one.number})

    def everybody(self) -> Iterator[Queued[T]]:
        """All requests without an answer."""
        yield from list(self.line)
        for batch in list(self.running.values()):
            yield from batch.requests
