"""All-reduce algorithms for n bytes on w workers: who sends what to whom, how long it takes, and which to choose.

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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, groupby, pairwise

from shoestring.core.units import bytes_text

NAIVE, TREE, RING, TWO_LEVEL, LIBRARY, MEMORY = "naive", "tree", "ring", "two-level", "library", "shared memory"
BY_MESSAGES = (NAIVE, TREE, RING, TWO_LEVEL)  # made of sends and receives
WAYS = (*BY_MESSAGES, LIBRARY, MEMORY)
WORTH = 0.05  # another algorithm than the usual one must be predicted to save this fraction
SIZES = tuple(
    1 << power for power in range(3, 33)
)  # sizes in bytes for which an algorithm is chosen; sizes in between use the next larger one's

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


# The cost


@dataclass(frozen=True)
class Rate:
    """The cost of messages in sums up to some size: small ones may fit into a cache or be sent at once, so larger ones
    cost more."""

    per_byte: float = 0.0  # seconds
    per_message: float = 0.0  # seconds
    most: int = 0  # largest size in bytes of the sum; 0: any


@dataclass(frozen=True)
class Path:
    """The longest path of an all-reduce: sequential messages, and the bytes in them as fractions of the bytes that are
    summed."""

    inside: float = 0.0  # messages inside a machine
    inside_share: float = 0.0
    between: float = 0.0  # messages between machines
    between_share: float = 0.0
    added: float = 0.0  # fraction of the bytes that workers add one after the other


@dataclass(frozen=True)
class Speeds:
    """Communication speeds of workers, measured or described."""

    here: int = 0  # workers on each machine; 0: all are on one
    inside: Rate = Rate()  # messages within a machine,
    between: Rate = Rate()  # and between machines
    adding: float = 0.0  # seconds per byte that is added
    only: str = ""  # the only algorithm available: GPUs have their library; empty: any
    measured: Mapping[str, tuple[Rate, ...]] = field(
        default_factory=dict
    )  # algorithm -> rates of its messages, by rising size, including additions
    # and, where processes share a core, waiting for it

    def machines(self, line: Iterable[int]) -> Machines:
        """The number of a line's workers on each machine, in the order of ranks."""
        return tuple(len(list(some)) for _, some in groupby(line, lambda rank: rank // self.here if self.here else 0))


@lru_cache(maxsize=256)
def path(way: str, machines: Machines) -> Path:
    """The longest path of an algorithm."""
    world, count, most, least = sum(machines), len(machines), max(machines), min(machines)
    if world == 1:
        return Path()
    if way == NAIVE:
        near, far = machines[0] - 1, world - machines[0]
        return Path(2 * near, 2 * near, 2 * far, 2 * far, world - 1)
    if way == TREE:
        machine_of = [number for number, size in enumerate(machines) for _ in range(size)]
        bits = [1 << power for power in range((world - 1).bit_length())]
        far = sum(
            any(machine_of[rank] != machine_of[rank + bit] for rank in range(0, world - bit, 2 * bit)) for bit in bits
        )
        near = len(bits) - far
        return Path(2 * near, 2 * near, 2 * far, 2 * far, len(bits))
    if way == TWO_LEVEL:
        near, far = most - 1, count - 1
        return Path(2 * near, 2 * near / least, 2 * far, 2 * far / count, near / least + far / count / least)
    if way == MEMORY:
        return Path(2, 2 * (world - 1) / world)
    messages, share = 2 * (world - 1), 2 * (world - 1) / world
    added = (world - 1) / world
    if way == LIBRARY:
        messages, added = 2 * (world - 1).bit_length(), 0  # additions overlap with the next message
    return Path(messages, share, added=added) if count == 1 else Path(0, 0, messages, share, added)


def seconds(way: str, size: int, machines: Machines, speeds: Speeds) -> float:
    """Seconds to all-reduce `size` bytes."""
    found = path(way, machines)
    if own := speeds.measured.get(way):
        rate = next((one for one in own if size <= one.most), own[-1])
        messages, share = found.inside + found.between, found.inside_share + found.between_share
        return max(messages * rate.per_message + share * size * rate.per_byte, 0.0)
    near, far = speeds.inside, speeds.between
    return (
        found.inside * near.per_message
        + found.between * far.per_message
        + found.added * size * speeds.adding
        + size * (found.inside_share * near.per_byte + found.between_share * far.per_byte)
    )


def fit_rates(way: str, machines: Machines, timed: Sequence[tuple[int, float]]) -> tuple[Rate, ...]:
    """The rates of an algorithm from timed sums of two or more rising sizes, as (bytes, seconds): one line between each
    two."""
    found = path(way, machines)
    messages, share = found.inside + found.between, found.inside_share + found.between_share
    rising = list(
        zip((size for size, _ in timed), accumulate((took for _, took in timed), max), strict=True)
    )  # ignoring a busy moment
    rates = []
    for (size, took), (larger, longer) in pairwise(rising):
        per_byte = (longer - took) / (share * (larger - size))
        rates.append(Rate(per_byte, (took - share * size * per_byte) / messages, larger))
    return tuple(rates)


# Choosing an algorithm


def ways(machines: Machines, speeds: Speeds) -> list[str]:
    """The available algorithms, the usual one first; measurements tell whether a library or shared memory can be
    used."""
    if speeds.only:
        return [speeds.only]
    found = [MEMORY] * (MEMORY in speeds.measured and len(machines) == 1) + [LIBRARY] * (LIBRARY in speeds.measured)
    found += [RING, TREE, NAIVE, *[TWO_LEVEL] * (len(machines) > 1 and max(machines) > 1)]
    return [
        way for way in found if way in speeds.measured or speeds.inside != Rate() or not speeds.measured
    ]  # those with known rates


def choose_algorithm(size: int, machines: Machines, speeds: Speeds) -> str:
    """The algorithm for `size` bytes: the fastest, or the usual one if that would save next to nothing."""
    times = {way: seconds(way, size, machines, speeds) for way in ways(machines, speeds)}
    usual, best = next(iter(times)), min(times, key=lambda way: times[way])
    return best if times[best] < (1 - WORTH) * times[usual] else usual


@dataclass(frozen=True)
class AllReduceTable:
    """The all-reduce algorithms of one line's workers, by size."""

    machines: Machines
    table: tuple[
        tuple[int, str], ...
    ] = ()  # (bytes, algorithm up to that size); larger sizes use the last. Empty: the link's usual algorithm

    def way(self, size: int) -> str:
        return next((way for most, way in self.table if size <= most), self.table[-1][1] if self.table else "")

    @property
    def alike(self) -> bool:
        """Whether every worker sends equally much, so that one of them tells for all."""
        return not any(way in BY_MESSAGES for _, way in self.table)

    def __str__(self) -> str:
        """In words.

        >>> str(AllReduceTable((2, 2), ((8192, "tree"), (1 << 32, "two-level"))))
        'sums of 4 workers on 2 machines: tree up to 8.00 KiB, two-level above'
        """
        if not self.table:
            return ""
        where = f" on {len(self.machines)} machines" if len(self.machines) > 1 else ""
        *most, last = self.table
        told = [*(f"{way} up to {bytes_text(size)}" for size, way in most), f"{last[1]} above" if most else last[1]]
        return f"sums of {sum(self.machines)} workers{where}: {', '.join(told)}"


def sums_of(speeds: Speeds | None, line: Sequence[int]) -> AllReduceTable:
    """The all-reduce algorithms of a line's workers, given their ranks; without speeds, the link's usual one."""
    if speeds is None or len(line) == 1:
        return AllReduceTable((len(line),))
    machines = speeds.machines(line)
    each = [(size, choose_algorithm(size, machines, speeds)) for size in SIZES]
    return AllReduceTable(
        machines, tuple(one for one, after in zip(each, [*each[1:], (0, "")], strict=True) if one[1] != after[1])
    )
