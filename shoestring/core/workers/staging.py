"""How a plan cuts a model across workers, and the timeline of their actions: as predicted, and as measured.

Contract: Times of the workers of one machine are of one clock; between machines they count from the moment at which the
step's last sum was there (tests/core/workers/test_staging.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

from shoestring.core.files.codec import Unreadable
from shoestring.core.workers.actions import Kind

YOUNG = 2  # a process's first steps, which are tracked and slow: not counted in measurements if there are later ones


class Work(NamedTuple):
    """An action of a worker in a step, with its begin and end in seconds from the step's begin."""

    kind: str  # F: forward; B: backward; I and W: its halves, gradients of inputs and of weights
    piece: int
    chunk: int  # of the model
    begin: float
    end: float

    def as_json(self) -> list[Any]:
        return list(self)

    @classmethod
    def from_json(cls, data: Any) -> Work:
        """
        >>> Work.from_json(["F", 0, 1, 0.5, 1])
        Work(kind='F', piece=0, chunk=1, begin=0.5, end=1)
        """
        if (
            not isinstance(data, (list, tuple))
            or [type(one) for one in data[:3]] != [str, int, int]
            or len(data) != 5
            or any(type(one) not in (int, float) for one in data[3:])
            or data[0] not in set(Kind)
        ):
            raise Unreadable(f"{data!r} is nothing that a worker does: a kind, a piece, a chunk, from when, until when")
        return cls(*data)


Timeline = tuple[tuple[Work, ...], ...]  # of every worker along the stages


@dataclass(frozen=True)
class Staging:
    cut: tuple[int, ...]  # blocks in every chunk of the model, in execution order
    schedule: str
    pieces: int  # micro-batches of a batch
    bubble: float  # fraction of a step's time that workers wait for each other, over all of them
    timeline: Timeline = ()
    memory: tuple[float, ...] = ()  # bytes of tensors on each worker, by the ledger
    why: str = ""  # the reason for the cut, in a sentence
    names: tuple[str, ...] = ()  # of all blocks, in execution order

    @property
    def blocks(self) -> tuple[tuple[str, ...], ...]:
        """The names of the blocks of every chunk."""
        ends = [sum(self.cut[: place + 1]) for place in range(len(self.cut))]
        return tuple(self.names[end - size : end] for end, size in zip(ends, self.cut, strict=True))

    def slower(self, factor: float) -> Staging:
        """The same with all times multiplied by `factor`."""
        return replace(
            self,
            timeline=tuple(
                tuple(work._replace(begin=work.begin * factor, end=work.end * factor) for work in own)
                for own in self.timeline
            ),
        )


@dataclass(frozen=True)
class RankFigures:
    """What is predicted of some workers of a group, which are alike."""

    ranks: tuple[int, ...]
    peak_bytes: int
    sent_bytes: float  # per step


class WorkerTimes(NamedTuple):
    """A worker's first and last moment of computing in a step, and its busy seconds in between."""

    begin: float
    end: float
    busy: float


@dataclass(frozen=True)
class OwnTimes:
    """One worker's actions, by a clock that the workers of its line share."""

    works: tuple[Work, ...] = ()  # of the last step
    steps: tuple[WorkerTimes, ...] = ()  # of the last several steps
    before: int = 0  # earlier steps of this process
    drains: bool = True  # whether all workers meet at the end of a step; else each has its own times


@dataclass(frozen=True)
class LineTimes:
    """The actions of a line's workers, put together."""

    timeline: Timeline  # of the last step, from its begin
    idle: float  # fraction of a step that workers wait, the median over several steps
    steps: int


def together(line: Sequence[OwnTimes]) -> LineTimes | None:
    """A line's last step, and its idle time; None if one of the workers did nothing."""
    if not line or not all(own.works for own in line):
        return None
    count = min(len(own.steps) for own in line)
    first = max(0, min(YOUNG - min(own.before + len(own.steps) - count for own in line), count - 1))
    steps = [[own.steps[len(own.steps) - count + place] for own in line] for place in range(first, count)]
    shares = [idle_of(step) if line[0].drains else sum(idle_of([own]) for own in step) / len(step) for step in steps]
    begin = min(work.begin for own in line for work in own.works)
    piece = min(work.piece for own in line for work in own.works)  # micro-batches may be numbered across steps
    timeline = tuple(
        tuple(
            work._replace(piece=work.piece - piece, begin=round(work.begin - begin, 6), end=round(work.end - begin, 6))
            for work in own.works
        )
        for own in line
    )
    return LineTimes(timeline, median(shares), len(shares))


def idle_of(step: Sequence[WorkerTimes]) -> float:
    """The fraction of a step that its workers wait.

    >>> idle_of([WorkerTimes(0.0, 3.0, 3.0), WorkerTimes(1.0, 4.0, 3.0)])
    0.25
    """
    seconds = max(own.end for own in step) - min(own.begin for own in step)
    return 1 - sum(own.busy for own in step) / (len(step) * seconds) if seconds > 0 else 0.0
