"""Event simulation of asynchronous devices: which one finishes next, and which one starts in its place.

slots 3, buffer 2        a ---------*b ------------------ ...      *: a device finishes, and another starts from the newest weights
                         c ----*d -------*e ------------- ...
                         f ------------------------------ ...
                               ^    ^ two have finished: new weights
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import torch


class DeviceAtWork(NamedTuple):
    """A device at work."""

    done: float  # when it will finish, in simulated seconds
    number: int  # of the device
    version: int  # of the weights that it started from: the round in which they were the newest


class BufferFill(NamedTuple):
    """What happened until the buffer was full."""

    arrived: tuple[DeviceAtWork, ...]  # as many as the buffer holds, in the order in which they finished
    flying: tuple[DeviceAtWork, ...]  # devices still at work, the next to finish first
    clock: float  # simulated seconds since the first round began
    dropped: int  # devices given up because the weights they started from are too old


@dataclass(frozen=True)
class BufferRules:
    slots: int  # devices at work at a time
    buffer: int  # updates that make a round
    oldest: int  # greatest age of an update, in rounds


def fill_buffer(
    flying: Sequence[DeviceAtWork],
    clock: float,
    version: int,
    rules: BufferRules,
    draw: Callable[[Collection[int]], int | None],
    seconds: Callable[[int], float],
) -> BufferFill:
    """Simulate one round, in which the weights `version` are the newest, until the buffer is full.

    `flying` are the devices at work and `clock` the time when the round begins. A device works for one order at a time,
    so a buffer has at most one update of it. If no device is idle, a slot stays empty until the round ends. `draw`
    returns a device that is not in a collection of busy ones, or None; `seconds` is how long a device takes.
    """
    queue = [one for one in flying if one.version >= version - rules.oldest]
    arrived: list[DeviceAtWork] = []
    heapify(queue)
    busy = {one.number for one in queue}

    def begin_one() -> bool:
        number = draw(busy)
        if number is not None:
            busy.add(number)
            heappush(queue, DeviceAtWork(clock + seconds(number), number, version))
        return number is not None

    dropped = len(flying) - len(queue)
    while len(queue) < rules.slots and begin_one():
        pass
    while len(arrived) < rules.buffer:
        arrived.append(heappop(queue))
        clock = arrived[-1].done
        if (
            len(arrived) < rules.buffer
        ):  # the last one's slot is filled next round, from the weights that this round makes
            begin_one()
    return BufferFill(tuple(arrived), tuple(sorted(queue)), clock, dropped)


def draw_idle_device(count: int, busy: Collection[int], generator: torch.Generator) -> int | None:
    """Draw one of the idle devices uniformly; None if all `count` devices are busy."""
    if len(busy) >= count:
        return None
    if 2 * len(busy) >= count:
        free = [number for number in range(count) if number not in busy]
        return free[int(torch.randint(len(free), (), generator=generator))]
    while True:
        number = int(torch.randint(count, (), generator=generator))
        if number not in busy:
            return number
