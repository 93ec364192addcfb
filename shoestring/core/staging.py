"""How a plan cuts a model across workers, and when each of them does what: what a technique that does so tells of itself, as predicted and
as measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

from shoestring.core.codec import Unreadable

YOUNG = 2  # first steps of a process, which are tracked and slow: they are left out of what is measured, as far as there are others


class Work(NamedTuple):
    """Something that a worker does in a step, and when, in seconds from its beginning."""

    kind: str  # F: forward; B: backward; I and W: its halves, to what came in and to the weights
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
        ):
            raise Unreadable(f"{data!r} is nothing that a worker does: a kind, a piece, a chunk, from when, until when")
        return cls(*data)


Timeline = tuple[tuple[Work, ...], ...]  # of every worker along the stages


@dataclass(frozen=True)
class Staging:
    cut: tuple[int, ...]  # blocks of every chunk of the model, in the order in which they run
    schedule: str
    pieces: int  # of a batch
    bubble: float  # share of a step's time in which workers wait for each other; of all of them
    timeline: Timeline = ()
    memory: tuple[float, ...] = ()  # bytes of tensors that each of them needs, by the ledger
    why: str = ""  # why it is cut there, in a sentence
    names: tuple[str, ...] = ()  # of all blocks, in the order in which they run

    @property
    def blocks(self) -> tuple[tuple[str, ...], ...]:
        """The names of the blocks of every chunk."""
        ends = [sum(self.cut[: place + 1]) for place in range(len(self.cut))]
        return tuple(self.names[end - size : end] for end, size in zip(ends, self.cut, strict=True))

    def slower(self, factor: float) -> Staging:
        """The same where everything takes so many times as long."""
        return replace(
            self,
            timeline=tuple(
                tuple(work._replace(begin=work.begin * factor, end=work.end * factor) for work in own)
                for own in self.timeline
            ),
        )


class WorkerTimes(NamedTuple):
    """When a worker computed first and last in a step, and for how many seconds between."""

    begin: float
    end: float
    busy: float


@dataclass(frozen=True)
class OwnTimes:
    """What one worker did when, by a clock that the workers of its line share."""

    works: tuple[Work, ...] = ()  # of the last step
    steps: tuple[WorkerTimes, ...] = ()  # of the last ones
    before: int = 0  # steps of this process before those
    drains: bool = True  # all workers meet at the end of a step; else each has times of its own


@dataclass(frozen=True)
class LineTimes:
    """What the workers of a line did, put together."""

    timeline: Timeline  # of the last step, from its beginning
    idle: float  # share of a step in which they wait, the median of so many steps
    steps: int


def together(line: Sequence[OwnTimes]) -> LineTimes | None:
    """What a line of workers did in the last step, and how long they were idle; None where one of them did nothing."""
    if not line or not all(own.works for own in line):
        return None
    count = min(len(own.steps) for own in line)
    first = max(0, min(YOUNG - min(own.before + len(own.steps) - count for own in line), count - 1))
    steps = [[own.steps[len(own.steps) - count + place] for own in line] for place in range(first, count)]
    shares = [idle_of(step) if line[0].drains else sum(idle_of([own]) for own in step) / len(step) for step in steps]
    begin = min(work.begin for own in line for work in own.works)
    piece = min(work.piece for own in line for work in own.works)  # pieces may be counted over all steps
    timeline = tuple(
        tuple(
            work._replace(piece=work.piece - piece, begin=round(work.begin - begin, 6), end=round(work.end - begin, 6))
            for work in own.works
        )
        for own in line
    )
    return LineTimes(timeline, median(shares), len(shares))


def idle_of(step: Sequence[WorkerTimes]) -> float:
    """The share of a step in which its workers wait.

    >>> idle_of([WorkerTimes(0.0, 3.0, 3.0), WorkerTimes(1.0, 4.0, 3.0)])
    0.25
    """
    seconds = max(own.end for own in step) - min(own.begin for own in step)
    return 1 - sum(own.busy for own in step) / (len(step) * seconds) if seconds > 0 else 0.0
