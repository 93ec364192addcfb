"""How much other processes slowed down a timing, and which of several timings to believe.

A step that shares its cores takes a multiple of its time by the clock, and two steps are slowed down differently, so
their ratio says nothing. For every thread, the kernel's scheduler counts the seconds it ran and the seconds it was
ready without a core. Their ratio says how much a timing was slowed down. Timings that were hardly slowed down count as
they are; if there is none, the least slowed one counts, with its waiting time subtracted, and the measurement is marked
as busy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

HELD_UP = 0.1  # largest fraction of a timing that threads may wait for a core: steps on a quiet machine differ as much


class Effort(NamedTuple):
    """Seconds of all threads of a process since they started."""

    ran: float  # on a core
    waited: float  # ready to run, without a core


class Timing(NamedTuple):
    """One timing."""

    seconds: float  # by the clock
    ran: float  # thread seconds on a core,
    waited: float = 0.0  # and waiting for one

    @property
    def held_up(self) -> float:
        """The fraction of their runnable time that threads had no core.

        >>> Timing(4.0, ran=2.0, waited=6.0).held_up
        0.75
        """
        return self.waited / (self.ran + self.waited) if self.waited > 0 else 0.0

    @property
    def alone(self) -> float:
        """The seconds it would take without waiting. Threads that spin while they wait for a waiting thread count as
        running, so this is too much rather than too little.

        >>> Timing(4.0, ran=2.0, waited=6.0).alone
        1.0
        """
        return self.seconds * (1 - self.held_up)


def effort() -> Effort:
    """The effort of this process so far; if the kernel does not count waiting, only running."""
    found: list[list[int]] = []
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, ValueError):  # a thread may end meanwhile
            found.append([int(word) for word in path.read_text(encoding="ascii").split()[:2]])
    if not found:
        return Effort(time.process_time(), 0.0)
    return Effort(sum(ran for ran, _ in found) / 1e9, sum(waited for _, waited in found) / 1e9)


class LoadWatch:
    """How much other processes slow this one down as it goes on. A look opens a file for every thread, so there are few
    of them."""

    def __init__(self, apart: float = 0.25, look: Callable[[], Effort] = effort) -> None:
        self.apart, self.look = apart, look  # seconds between two looks
        self.last, self.before = 0.0, look()

    def held_up(self, now: float) -> float | None:
        """The fraction of their runnable time that threads had no core, since the last look; None: not looked again
        yet.

        >>> efforts = iter([Effort(0.0, 0.0), Effort(1.0, 0.0), Effort(2.0, 3.0)])
        >>> watch = LoadWatch(1.0, lambda: next(efforts))
        >>> watch.held_up(10.0), watch.held_up(10.5), watch.held_up(11.0)
        (0.0, None, 0.75)
        """
        if now - self.last < self.apart:
            return None
        before, self.before, self.last = self.before, self.look(), now
        return round(timing(0.0, before, self.before).held_up, 3)


def timing(seconds: float, before: Effort, after: Effort) -> Timing:
    return Timing(seconds, max(after.ran - before.ran, 0.0), max(after.waited - before.waited, 0.0))


def believed_timings(timings: Sequence[Timing]) -> list[int]:
    """Indices of the timings that count: those that were hardly slowed down, or else the least slowed one.

    >>> quiet, slow, slower = Timing(1.0, 2.0, 0.1), Timing(3.0, 2.0, 4.0), Timing(9.0, 2.0, 16.0)
    >>> believed_timings([slow, quiet, slower]), believed_timings([slower, slow])
    ([1], [1])
    """
    quiet = [number for number, one in enumerate(timings) if one.held_up <= HELD_UP]
    return quiet or [min(range(len(timings)), key=lambda number: (timings[number].held_up, timings[number].alone))]


def busy_share(timings: Sequence[Timing]) -> float:
    """How much the counted timings were slowed down; above HELD_UP the machine was busy all the time.

    >>> busy_share([Timing(1.0, 2.0, 0.0), Timing(3.0, 2.0, 4.0)]), busy_share([Timing(4.0, 2.0, 6.0)])
    (0.0, 0.75)
    """
    return max(timings[number].held_up for number in believed_timings(timings))


def enough(timings: Sequence[Sequence[Timing]], count: int, most: int) -> bool:
    """Whether each series was timed `count` times, and up to `most` times while one has no undisturbed timing."""
    done = min(len(one) for one in timings)
    return done >= count and (done >= most or all(busy_share(one) <= HELD_UP for one in timings))
