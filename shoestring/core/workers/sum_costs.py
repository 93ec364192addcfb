"""The cost of all-reduce algorithms (core/workers/sums.py), and which one to choose for a size: described by a cluster's speeds,
or fitted to measured sums."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, groupby, pairwise

from shoestring.core.units import bytes_text
from shoestring.core.workers.sums import BY_MESSAGES, LIBRARY, MEMORY, NAIVE, RING, TREE, TWO_LEVEL, Machines

WORTH = 0.05  # another algorithm than the usual one must be predicted to save this fraction
SIZES = tuple(
    1 << power for power in range(3, 33)
)  # sizes in bytes for which an algorithm is chosen; sizes in between use the next larger one's


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
