"""Choose one storage option per weight: the least damage within bytes and seconds, or the fewest bytes within a damage.

Damages, bytes and seconds of single weights add up, so this is a multiple-choice knapsack problem. It is solved by
dynamic programming over the bytes in excess of the smallest options, in units so small that rounding up wastes less
than one percent of them; the smallest solution is therefore always found. Seconds are added to the damage with a price,
which is found by bisection (Lagrange multiplier; Everett 1963, doi 10.1287/opre.11.3.399).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

UNITS = 16_000  # into which the bytes above the smallest solution are divided
PRICES = 40  # steps of the bisection

What = TypeVar("What")


@dataclass(frozen=True)
class Option(Generic[What]):
    """One way to store a weight."""

    what: What
    bytes: int
    damage: float
    seconds: float = 0.0  # extra time per forward pass, compared with the plain weight
    memory: int = 0  # bytes in a loaded model
    damages: tuple[float, ...] = ()  # to every output of the model; `damage` combines them


Options = Mapping[str, Sequence[Option[What]]]
Allocation = dict[str, Option[What]]


def total(allocation: Mapping[str, Option[What]]) -> tuple[int, float, float]:
    """Total bytes, damage and seconds."""
    taken = allocation.values()
    return sum(one.bytes for one in taken), sum(one.damage for one in taken), sum(one.seconds for one in taken)


def smallest_bytes(options: Options[What]) -> int:
    """Total bytes if every weight takes its smallest option."""
    return sum(min(one.bytes for one in some) for some in options.values())


def least_damage(options: Options[What], most_bytes: float = inf, most_seconds: float = inf) -> Allocation[What] | None:
    """The allocation with the least damage within bytes and seconds; None if nothing fits.

    >>> a, b = ([Option("8 bits", 8, little), Option("4 bits", 4, much)] for little, much in ((0.1, 0.4), (0.2, 0.9)))
    >>> found = least_damage({"a": a, "b": b}, 12)
    >>> {name: one.what for name, one in found.items()}
    {'a': '4 bits', 'b': '8 bits'}
    """
    if smallest_bytes(options) > most_bytes:
        return None
    if sum(min(one.seconds for one in some) for some in options.values()) > most_seconds:
        return None
    free = solve_table(options, most_bytes, 0.0).best_allocation()
    if free is not None and total(free)[2] <= most_seconds:
        return spend_rest(free, options, most_bytes, most_seconds)
    low, high, best = 0.0, 1e-6, None
    while high < 1e12 and (best is None or total(best)[2] > most_seconds):  # find an upper bound for the price
        high *= 10
        best = solve_table(options, most_bytes, high).best_allocation()
    if best is None or total(best)[2] > most_seconds:
        return None
    for _ in range(PRICES):
        price = (low + high) / 2
        found = solve_table(options, most_bytes, price).best_allocation()
        if found is not None and total(found)[2] <= most_seconds:
            high, best = price, found
        else:
            low = price
    return spend_rest(best, options, most_bytes, most_seconds)


def fewest_bytes(options: Options[What], most_damage: float, most_seconds: float = inf) -> Allocation[What] | None:
    """The allocation with the fewest bytes within a damage and seconds; None if nothing fits."""
    low = smallest_bytes(options)
    high = sum(max(one.bytes for one in some) for some in options.values())
    best = least_damage(options, high, most_seconds)
    if best is None or total(best)[1] > most_damage:
        return None
    for _ in range(30):
        middle = (low + high) // 2
        found = least_damage(options, middle, most_seconds)
        if found is not None and total(found)[1] <= most_damage:
            high, best = min(middle, total(found)[0]), found
        else:
            low = middle + 1
        if low >= high:
            break
    return best


@dataclass(frozen=True)
class DamageTable(Generic[What]):
    """The knapsack's table: the least damage within every number of units, and the options that reach it."""

    options: Options[What]
    unit: float  # bytes
    chosen: list[NDArray[np.int16]]  # for every weight and every number of units: the option taken
    least: NDArray[np.float64]  # damage within every number of units

    def best_allocation(self) -> Allocation[What] | None:
        place = len(self.least) - 1
        if not np.isfinite(self.least[place]):
            return None
        found: Allocation[What] = {}
        for (name, some), picks in zip(reversed(list(self.options.items())), reversed(self.chosen), strict=True):
            option = some[int(picks[place])]
            found[name] = option
            place -= units(option.bytes - min(one.bytes for one in some), self.unit)
        return dict(reversed(found.items()))


def units(size: int, unit: float) -> int:
    return int(-(-size // unit))


def solve_table(options: Options[What], most_bytes: float, price: float) -> DamageTable[What]:
    """Fill the knapsack's table. `price`: damage per second."""
    low = smallest_bytes(options)
    room = min(most_bytes, sum(max(one.bytes for one in some) for some in options.values())) - low
    unit = max(room / UNITS, 1.0)
    width = int(room // unit) + 1 + (len(options) if most_bytes > low + room else 0)  # every weight may waste a unit
    least, chosen = np.zeros(width), []
    for some in options.values():
        rows, least_bytes = np.full((len(some), width), inf), min(one.bytes for one in some)
        for number, option in enumerate(some):
            size = units(option.bytes - least_bytes, unit)
            if size < width:
                rows[number, size:] = least[: width - size] + option.damage + price * option.seconds
        picks = rows.argmin(0)
        chosen.append(picks.astype(np.int16))
        least = rows[picks, np.arange(width)]
    return DamageTable(options, unit, chosen, least)


def spend_rest(
    allocation: Allocation[What] | None, options: Options[What], most_bytes: float, most_seconds: float
) -> Allocation[What] | None:
    """Greedily spend the bytes left by rounding: repeat the step that saves most damage per byte and still fits."""
    if allocation is None:
        return None
    now = dict(allocation)
    while True:
        size, _, seconds = total(now)
        steps = [
            ((now[name].damage - one.damage) / max(one.bytes - now[name].bytes, 1e-9), name, one)
            for name, some in options.items()
            for one in some
            if one.damage < now[name].damage
            and size + one.bytes - now[name].bytes <= most_bytes
            and seconds + one.seconds - now[name].seconds <= most_seconds
        ]
        if not steps:
            return now
        _, name, one = max(steps, key=lambda step: step[0])
        now[name] = one


def frontier(options: Options[What], points: int = 24, most_seconds: float = inf) -> list[Allocation[What]]:
    """Pareto-optimal allocations, from the smallest to the one that more bytes no longer improve."""
    low = smallest_bytes(options)
    best = least_damage(options, inf, most_seconds)
    if best is None:
        return []
    high = max(total(best)[0], low)
    found = [
        least_damage(options, low + (high - low) * (number / (points - 1)) ** 1.5, most_seconds)
        for number in range(points)
    ]
    there = [one for one in found if one is not None]
    return [one for number, one in enumerate(there) if number == 0 or total(one)[1] < total(there[number - 1])[1]]
