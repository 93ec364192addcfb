"""Devices that work without waiting for each other, as events in simulated time: who is done next, and who begins then.

slots 3, buffer 2        a ---------*b ------------------ ...      *: one is done, another begins in its slot from the newest weights
                         c ----*d -------*e ------------- ...
                         f ------------------------------ ...
                               ^    ^ two are done: new weights
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import torch


class Flying(NamedTuple):
    """A device at work."""

    done: float  # when it will be, in simulated seconds
    number: int  # of the device
    version: int  # of the weights that it began from: the round in which they were the newest


class Flown(NamedTuple):
    """What happened until the buffer was full."""

    arrived: tuple[Flying, ...]  # as many as the buffer holds, in the order in which they were done
    flying: tuple[Flying, ...]  # who is still at work, soonest done first
    clock: float  # simulated seconds since the first round began
    dropped: int  # devices that were given up: they had begun from weights that are too old


def flown(
    flying: Sequence[Flying],
    clock: float,
    version: int,
    oldest: int,
    slots: int,
    buffer: int,
    draw: Callable[[Collection[int]], int | None],
    seconds: Callable[[int], float],
) -> Flown:
    """The events of one round, in which the weights `version` are the newest.

    A device works for one order at a time, and its update is at most once in a buffer. Where nobody is free, a slot stays empty until the
    round ends. `draw`: a device that is not among those given, None if there is none; `seconds` that a device takes.
    """
    queue = [one for one in flying if one.version >= version - oldest]
    arrived: list[Flying] = []
    heapify(queue)
    busy = {one.number for one in queue}

    def begin_one() -> bool:
        number = draw(busy)
        if number is not None:
            busy.add(number)
            heappush(queue, Flying(clock + seconds(number), number, version))
        return number is not None

    dropped = len(flying) - len(queue)
    while len(queue) < slots and begin_one():
        pass
    while len(arrived) < buffer:
        arrived.append(heappop(queue))
        clock = arrived[-1].done
        if len(arrived) < buffer:  # in the place of the last one, a device begins from the weights that it makes
            begin_one()
    return Flown(tuple(arrived), tuple(sorted(queue)), clock, dropped)


def drawn(count: int, busy: Collection[int], generator: torch.Generator) -> int | None:
    """One of `count` devices that is not busy, each with the same chance."""
    if len(busy) >= count:
        return None
    if 2 * len(busy) >= count:
        free = [number for number in range(count) if number not in busy]
        return free[int(torch.randint(len(free), (), generator=generator))]
    while True:
        number = int(torch.randint(count, (), generator=generator))
        if number not in busy:
            return number
