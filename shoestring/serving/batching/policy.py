"""Which waiting requests make the next batch: a pure function, which the server runs and the prediction simulates.

A replica that is free takes at once what is there; nothing waits for a batch to fill, and nothing polls. The oldest request of
the most urgent class is always in the batch; others join it in order of age while they fit.

    packed      sum of lengths  <=  tokens
    padded      rows x longest  <=  tokens,  and lengths between SIMILAR x longest and longest

One request that is longer than the budget is a batch of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

SIMILAR = 0.75  # padding wastes at most a quarter of what is computed
SKIPPED = 64  # requests that do not fit before the search for others that do is given up


@dataclass(frozen=True)
class Waiting:
    """A request that waits."""

    length: int
    arrived: float  # seconds
    urgency: int = 0  # the larger, the earlier
    deadline: float = inf  # seconds; after it nobody wants the answer


@dataclass(frozen=True)
class Batching:
    """How batches are made."""

    tokens: int  # most positions in a batch, padding included
    rows: int = 1024  # most requests in a batch
    packed: bool = False  # lengths are mixed without padding


def next_batch(waiting: Sequence[Waiting], how: Batching, now: float) -> list[int]:
    """Places of the requests that are computed together now; those past their deadline are never among them.

    >>> waiting = [Waiting(10, 0.0), Waiting(90, 0.1), Waiting(12, 0.2)]
    >>> next_batch(waiting, Batching(tokens=40), 1.0), next_batch(waiting, Batching(tokens=120, packed=True), 1.0)
    ([0, 2], [0, 1, 2])
    """
    order = sorted(
        (place for place, one in enumerate(waiting) if one.deadline >= now),
        key=lambda place: (-waiting[place].urgency, waiting[place].arrived),
    )
    return [order[place] for place in choose_batch([waiting[place].length for place in order], how)]


def choose_batch(lengths: Sequence[int], how: Batching) -> list[int]:
    """Places of the requests in a batch, of those that wait, in the order in which they are considered.

    >>> choose_batch([10, 90, 12], Batching(tokens=40)), choose_batch([90, 10], Batching(tokens=40)), choose_batch([], Batching(tokens=40))
    ([0, 2], [0], [])
    """
    if not lengths:
        return []
    taken, total, longest, shortest, skipped = [0], *[lengths[0]] * 3, 0
    for place in range(1, len(lengths)):
        if len(taken) >= how.rows or skipped == SKIPPED:
            break
        length = lengths[place]
        most, least = max(longest, length), min(shortest, length)
        size = total + length if how.packed else (len(taken) + 1) * most
        if size <= how.tokens and (how.packed or least >= SIMILAR * most):
            taken.append(place)
            total, longest, shortest = total + length, most, least
        else:
            skipped += 1
    return taken
