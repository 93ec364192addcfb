"""Where n of m numbers stand, in as few bytes as are known beforehand: the shortest of three ways.

    bitmap          m / 8                      a bit a number
    by byte         n + m / 255                a byte a place inside of its block of 255, and how many are in every block
    by two bytes    2 n + 2 m / 65535          the same with larger blocks

Whole numbers of 32 bits would be 4 n, more than one of these wherever n is above m / 1000 or so.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shoestring.numerics.bit_packing import pack_bits, unpack_bits

BLOCKS = {1: 255, 2: 65535}  # bytes of a place -> numbers of a block: as many as such a count can tell, too


class Placed(NamedTuple):
    places: Tensor  # (k, n) inside of their blocks, or (k, m / 8) bits; bytes
    counts: Tensor  # (k, blocks) in every block; empty for a bitmap


def shortest(count: int, size: int) -> tuple[int, int]:
    """Bytes, and bytes of a place: 0 for a bitmap.

    >>> [shortest(count, 100_000) for count in (30_000, 10_000, 1_000, 100)]
    [(12500, 0), (10393, 1), (1393, 1), (204, 2)]
    """
    return min((-(-size // 8), 0), *((width * (count + -(-size // block)), width) for width, block in BLOCKS.items()))


def placed(kept: Tensor, count: int) -> Placed:
    """Of (k, m) marks, `count` in every row."""
    rows, size = kept.shape
    width = shortest(count, size)[1]
    if not width:
        return Placed(pack_bits(kept, 1), torch.empty(rows, 0, dtype=torch.uint8))
    block = BLOCKS[width]
    where = kept.nonzero()[:, 1].view(rows, count)
    counts = torch.zeros(rows, -(-size // block), dtype=torch.long).scatter_add_(
        1, where // block, torch.ones_like(where)
    )
    return Placed(narrowed(where % block, width), narrowed(counts, width))


def marks(found: Placed, count: int, size: int) -> tuple[Tensor, Tensor]:
    """The marks (k, m), and of which rows (k) they make sense: `count` of them, each somewhere."""
    rows, width = len(found.places), shortest(count, size)[1]
    if not width:
        bits = unpack_bits(found.places, 1, 8 * found.places.shape[1]).bool()
        kept, beyond = bits[:, :size], bits[:, size:].any(1)
    else:
        block, counts = BLOCKS[width], widened(found.counts, width)
        begins = torch.arange(counts.shape[1]).expand(rows, -1)
        kept, beyond = torch.zeros(rows, size, dtype=torch.bool), counts.sum(1) != count
        for row in (~beyond).nonzero().flatten().tolist():
            where = torch.repeat_interleave(begins[row], counts[row]) * block + widened(found.places[row], width)
            beyond[row] = bool((where >= size).any())
            kept[row, where.clamp_(max=size - 1)] = True
    good = ~beyond & (kept.sum(1) == count)
    kept[~good] = torch.arange(size) < count
    return kept, good


def narrowed(numbers: Tensor, width: int) -> Tensor:
    """Whole numbers below 2^16 in one or two bytes; torch has few operations for two without a sign, so they wrap around."""
    return numbers.to(torch.uint8 if width == 1 else torch.int16)


def widened(numbers: Tensor, width: int) -> Tensor:
    return numbers.long() & (0xFF if width == 1 else 0xFFFF)
