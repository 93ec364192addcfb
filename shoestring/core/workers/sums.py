"""All-reduce algorithms for n bytes on w workers: who sends what to whom (their times and the choice: core/workers/sum_costs.py).

    way             seconds on the longest path (a per message, b per byte sent, c per byte added)  source
    naive           2 (w-1) (a + n b) + (w-1) n c                    all to one, and back
    tree            2 ceil(log2 w) (a + n b) + ceil(log2 w) n c      binomial tree to one, and back [1]
    ring            2 (w-1) a + 2 (w-1)/w n b + (w-1)/w n c          each part goes round, and its sum goes round again [2]
    two-level       2 (m-1) (a + n/g b) + 2 (k-1) a' + 2 (k-1)/k n b' + ((m-1)/g + (k-1)/(g k)) n c
                    inside each of k machines, of at most m and at least g workers, one adds up each of g parts; those that have the same
                    part pass it in a ring between machines (a', b': the network, which the workers of a machine share); and back [3, 4]
    library         2 ceil(log2 w) a + 2 (w-1)/w n b                 NCCL's: trees for little, rings for much [5]; gloo's is a ring
    shared memory   2 a + 2 (w-1)/w n b, where a is a wait for all and b copies (training/links/shared_memory_link.py)

[1] Thakur, Rabenseifner, Gropp: Optimization of collective communication operations in MPICH, 2005. [2] Patarasuk,
Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009. [3] Goyal et al.: Accurate, large
minibatch SGD, 2017, arXiv 1706.02677. [4] Cho, Finkler, Kung, Hunter: BlueConnect, 2019. [5] Sanders, Speck, Traeff:
Two-tree algorithms for full bandwidth broadcast, reduction and scan, 2009.

`rounds` is one worker's program as data. The real link sends by it (training/links/sums.py) and every link counts by
it, so predicted bytes are exactly those sent, worker by worker: in the tree and naive algorithms workers send different
amounts.

Every algorithm adds in a fixed order, and one worker's sum is copied to the others: all have the same bits, in every
run. Naive and shared memory add in the order of ranks and give the same bits. With two workers all algorithms do,
because a + b = b + a. A tree of four gives the same bits as two levels of two and two. Otherwise algorithms differ by
rounding, so a run keeps the speeds by which its plan chose.

Contract: What is counted is what is sent: imagined and real links share this table (tests/training/links/test_sums.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

NAIVE, TREE, RING, TWO_LEVEL, LIBRARY, MEMORY = "naive", "tree", "ring", "two-level", "library", "shared memory"
BY_MESSAGES = (NAIVE, TREE, RING, TWO_LEVEL)  # made of sends and receives
WAYS = (*BY_MESSAGES, LIBRARY, MEMORY)

Machines = tuple[int, ...]  # number of workers on each machine, in the order of ranks


@dataclass(frozen=True)
class Send:
    to: int
    begin: int  # index of the first number that is sent
    end: int  # and one after the last


@dataclass(frozen=True)
class Receive:
    source: int
    begin: int
    end: int
    adds: bool  # whether it is added to the present numbers; else it replaces them


@dataclass(frozen=True)
class SendRound:
    """Sends that a worker begins at once, and receives in this order; the next round begins when all are done."""

    sends: tuple[Send, ...] = ()
    receives: tuple[Receive, ...] = ()


@lru_cache(maxsize=64)
def rounds(way: str, rank: int, machines: Machines, count: int) -> tuple[SendRound, ...]:
    """The rounds of one worker in an all-reduce of `count` numbers. Empty parts are not sent."""
    world = sum(machines)
    if world == 1:
        return ()
    made = (
        {NAIVE: naive, TREE: tree}[way](rank, world, count)
        if way in (NAIVE, TREE)
        else (ring(range(world), rank, 0, count) if way == RING else two_level(rank, machines, count))
    )
    full = (
        SendRound(
            tuple(one for one in each.sends if one.end > one.begin),
            tuple(one for one in each.receives if one.end > one.begin),
        )
        for each in made
    )
    return tuple(each for each in full if each.sends or each.receives)


def naive(rank: int, world: int, count: int) -> list[SendRound]:
    if rank:
        return [SendRound((Send(0, 0, count),)), SendRound((), (Receive(0, 0, count, adds=False),))]
    others = range(1, world)
    return [
        SendRound((), tuple(Receive(one, 0, count, adds=True) for one in others)),
        SendRound(tuple(Send(one, 0, count) for one in others)),
    ]


def tree(rank: int, world: int, count: int) -> list[SendRound]:
    """Binomial tree: a worker receives the sums of its children, sends its own to its parent, and the result comes
    back."""
    parent, children = family(rank, world)
    up = [SendRound((), (Receive(child, 0, count, adds=True),)) for child in children]
    down = [SendRound((Send(child, 0, count),)) for child in reversed(children)]
    if parent is None:
        return up + down
    return [*up, SendRound((Send(parent, 0, count),)), SendRound((), (Receive(parent, 0, count, adds=False),)), *down]


def family(rank: int, world: int) -> tuple[int | None, list[int]]:
    """A worker's parent in the tree (None for the root) and its children.

    >>> family(0, 6), family(4, 6), family(5, 6)
    ((None, [1, 2, 4]), (0, [5]), (4, []))
    """
    children, bit = [], 1
    while bit < world and not rank & bit:
        if rank + bit < world:
            children.append(rank + bit)
        bit *= 2
    return (rank - bit if rank else None), children


def ring(members: Sequence[int], place: int, begin: int, end: int) -> list[SendRound]:
    """The rounds of the member at `place` in a ring that sums some numbers: each part goes round once, and its sum once
    more."""
    parts, size = cut_range(begin, end, len(members)), len(members)
    after, before = members[(place + 1) % size], members[place - 1]

    def turn(step: int, adds: bool) -> SendRound:
        out, into = parts[(place - step) % size], parts[(place - step - 1) % size]
        return SendRound((Send(after, *out),), (Receive(before, *into, adds=adds),))

    return [turn(step, adds=True) for step in range(size - 1)] + [
        turn(step - 1, adds=False) for step in range(size - 1)
    ]


def two_level(rank: int, machines: Machines, count: int) -> list[SendRound]:
    """As many parts as the smallest machine has workers: the worker at a place of a machine sums the part with that
    number."""
    starts = list(accumulate(machines[:-1], initial=0))
    machine, place, parts = at_two_levels(rank, machines, count)
    here = range(starts[machine], starts[machine] + machines[machine])
    others = [one for one in here if one != rank]
    owners = [(here[number], part) for number, part in enumerate(parts) if number != place]
    if place >= len(parts):
        return [
            SendRound(tuple(Send(one, *part) for one, part in owners)),
            SendRound((), tuple(Receive(one, *part, adds=False) for one, part in owners)),
        ]
    own = parts[place]
    return [
        SendRound(
            tuple(Send(one, *part) for one, part in owners), tuple(Receive(one, *own, adds=True) for one in others)
        ),
        *ring([start + place for start in starts], machine, *own),
        SendRound(
            tuple(Send(one, *own) for one in others), tuple(Receive(one, *part, adds=False) for one, part in owners)
        ),
    ]


def at_two_levels(rank: int, machines: Machines, count: int) -> tuple[int, int, list[tuple[int, int]]]:
    """A worker's machine, its place there, and the parts into which the numbers are cut."""
    for machine, size in enumerate(machines):
        if rank < size:
            return machine, rank, cut_range(0, count, min(machines))
        rank -= size
    raise AssertionError("a rank belongs to a worker")


def cut_range(begin: int, end: int, parts: int) -> list[tuple[int, int]]:
    """A range cut into parts, as even as possible.

    >>> cut_range(10, 17, 3)
    [(10, 12), (12, 14), (14, 17)]
    """
    return list(pairwise(begin + (end - begin) * number // parts for number in range(parts + 1)))


@lru_cache(maxsize=65536)
def sent_bytes(way: str, rank: int, machines: Machines, count: int, itemsize: int) -> int:
    """Bytes that a worker sends to all-reduce `count` numbers: those of `rounds`, without making them. Libraries and
    shared memory count as a ring in which each worker sends the same."""
    world = sum(machines)
    if way not in BY_MESSAGES:
        return 2 * (world - 1) * count * itemsize // world
    if way in (NAIVE, TREE):
        parent, children = (
            family(rank, world) if way == TREE else (0 if rank else None, [] if rank else range(1, world))
        )
        return count * itemsize * (len(children) + (parent is not None))
    if way == RING:
        return ring_numbers(0, count, world, rank) * itemsize
    machine, place, parts = at_two_levels(rank, machines, count)
    if place >= len(parts):
        return count * itemsize
    begin, end = parts[place]
    return (
        (count - (end - begin))
        + ring_numbers(begin, end, len(machines), machine)
        + (machines[machine] - 1) * (end - begin)
    ) * itemsize


def ring_numbers(begin: int, end: int, size: int, place: int) -> int:
    """Numbers that the member at `place` of a ring sends: all parts but the next one's, and then all but that of the
    one after it."""
    if size == 1:
        return 0
    parts = cut_range(begin, end, size)
    return 2 * (end - begin) - sum(
        last - first for first, last in (parts[(place + 1) % size], parts[(place + 2) % size])
    )


def room(way: str, rank: int, machines: Machines, count: int) -> int:
    """Numbers that a worker needs temporary memory for: the largest incoming part, rounded up."""
    world = sum(machines)
    if way == RING:
        return -(-count // world) if world > 1 else 0
    if way in (NAIVE, TREE):
        return count if (family(rank, world)[1] if way == TREE else rank == 0 and world > 1) else 0
    machine, place, parts = at_two_levels(rank, machines, count)
    if place >= len(parts):
        return 0
    own = parts[place][1] - parts[place][0]
    return own if machines[machine] > 1 else -(-own // len(machines)) if len(machines) > 1 else 0
