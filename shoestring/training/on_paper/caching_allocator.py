"""A simulation of torch's CUDA caching allocator: a device holds not just its tensors but the segments that they are
cut from.

The rules are those at the head of torch's c10/cuda/CUDACachingAllocator.cpp and in its notes on CUDA semantics, with
default settings.
Sizes are rounded to 512 bytes. Requests up to 1 MiB share segments of 2 MiB, those below 10 MiB segments of 20 MiB,
larger ones get a segment of their own, rounded to 2 MiB. The smallest sufficient free block of the same stream and pool
is taken, and split if the remainder is worth it: 512 bytes of a small block, more than 1 MiB of a large one. Freed
neighbours are merged. If the device is full, segments that are entirely free are returned, and the request is tried
once more.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

ROUND = 512
SMALL = 1 << 20  # requests up to this size are small
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20  # for requests below OWN_SEGMENT
OWN_SEGMENT = 10 << 20
ROUND_SEGMENT = 2 << 20


def round_up(size: int) -> int:
    return max(ROUND, -(-size // ROUND) * ROUND)


def segment_size(size: int) -> int:
    """The segment size to request from the device for a rounded request."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < OWN_SEGMENT else -(-size // ROUND_SEGMENT) * ROUND_SEGMENT


class DeviceFull(Exception):
    """A request that the device can't serve, even after all free segments were returned."""


@dataclass(eq=False)
class MemoryBlock:
    pool: tuple[str, bool]  # stream, and whether it serves small requests
    address: int
    size: int
    free: bool = False
    before: MemoryBlock | None = None  # neighbours in the same segment
    after: MemoryBlock | None = None


@dataclass
class CachingAllocator:
    capacity: int  # bytes of the device available for segments
    reserved: int = 0  # bytes in segments
    allocated: int = 0  # bytes in blocks in use
    most_reserved: int = 0
    most_allocated: int = 0
    retries: int = 0  # times that segments had to be returned, which is slow: the device synchronises
    blocks: dict[str, MemoryBlock] = field(default_factory=dict)
    unused: dict[tuple[str, bool], list[tuple[int, int, MemoryBlock]]] = field(
        default_factory=dict
    )  # free blocks by size, then address
    fresh: int = 0  # address of the next segment

    def allocate(self, name: str, size: int, stream: str = "compute") -> None:
        if name in self.blocks:
            raise ValueError(f"{name} is allocated already")
        size = round_up(size)
        pool = (stream, size <= SMALL)
        block = self.best_fit(pool, size) or self.segment(pool, size)
        self.split(block, size)
        block.free = False
        self.blocks[name] = block
        self.allocated += block.size
        self.most_allocated = max(self.most_allocated, self.allocated)

    def release(self, name: str) -> None:
        """Free a block, and merge it with its free neighbours."""
        block = self.blocks.pop(name)
        self.allocated -= block.size
        for other in (block.before, block.after):
            if other is not None and other.free:
                self.forget(other)
                first, second = (other, block) if other is block.before else (block, other)
                first.size += second.size
                first.after = second.after
                if second.after is not None:
                    second.after.before = first
                block = first
        block.free = True
        insort(self.unused.setdefault(block.pool, []), (block.size, block.address, block))

    def best_fit(self, pool: tuple[str, bool], size: int) -> MemoryBlock | None:
        there = self.unused.get(pool, [])
        at = bisect_left(there, (size, -1))
        return there.pop(at)[2] if at < len(there) else None

    def segment(self, pool: tuple[str, bool], size: int) -> MemoryBlock:
        wanted = segment_size(size)
        if self.reserved + wanted > self.capacity:
            self.retries += 1
            self.give_back()
        if self.reserved + wanted > self.capacity:
            raise DeviceFull(f"{wanted:,} bytes more than the {self.reserved:,} of {self.capacity:,} that are taken")
        self.reserved += wanted
        self.most_reserved = max(self.most_reserved, self.reserved)
        block = MemoryBlock(pool, self.fresh, wanted)
        self.fresh += wanted
        return block

    def split(self, block: MemoryBlock, size: int) -> None:
        left = block.size - size
        if left < ROUND or (not block.pool[1] and left <= SMALL):
            return
        rest = MemoryBlock(block.pool, block.address + size, left, True, block, block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        insort(self.unused.setdefault(block.pool, []), (rest.size, rest.address, rest))

    def give_back(self) -> None:
        """Return segments that are entirely free."""
        for pool, there in self.unused.items():
            for _, _, block in there:
                self.reserved -= block.size if alone(block) else 0
            self.unused[pool] = [one for one in there if not alone(one[2])]

    def forget(self, block: MemoryBlock) -> None:
        there = self.unused[block.pool]
        del there[bisect_left(there, (block.size, block.address))]


def alone(block: MemoryBlock) -> bool:
    return block.before is None and block.after is None
