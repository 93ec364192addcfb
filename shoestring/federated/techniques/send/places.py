"""Encodes which n of m numbers a sparse update has, in the shortest of three forms. The size follows from n and m
alone.

    bitmap          m / 8                      a bit per number
    by byte         n + m / 255                the position inside a block of 255 as a byte, and how many there are in every block
    by two bytes    2 n + 2 m / 65535          the same with larger blocks

32-bit indices would take 4 n bytes, more than one of these if n is above m / 1000 or so.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shoestring.numerics.bit_packing import pack_bits, unpack_bits

BLOCKS = {
    1: 255,
    2: 65535,
}  # bytes of a position -> numbers of a block, chosen so that a block's count has the same width


class EncodedPlaces(NamedTuple):
    places: Tensor  # (k, n): positions inside their blocks, or (k, m / 8): bytes of the bitmap
    counts: Tensor  # (k, blocks): numbers in every block; empty for a bitmap


def shortest(count: int, size: int) -> tuple[int, int]:
    """Size of the shortest form in bytes, and bytes per position: 0 for a bitmap.

    >>> [shortest(count, 100_000) for count in (30_000, 10_000, 1_000, 100)]
    [(12500, 0), (10393, 1), (1393, 1), (204, 2)]
    """
    return min((-(-size // 8), 0), *((width * (count + -(-size // block)), width) for width, block in BLOCKS.items()))


def encode_places(kept: Tensor, count: int) -> EncodedPlaces:
    """Encode a mask (k, m) that has `count` True in every row."""
    rows, size = kept.shape
    width = shortest(count, size)[1]
    if not width:
        return EncodedPlaces(pack_bits(kept, 1), torch.empty(rows, 0, dtype=torch.uint8))
    block = BLOCKS[width]
    where = kept.nonzero()[:, 1].view(rows, count)
    counts = torch.zeros(rows, -(-size // block), dtype=torch.long).scatter_add_(
        1, where // block, torch.ones_like(where)
    )
    return EncodedPlaces(narrow(where % block, width), narrow(counts, width))


def decode_places(found: EncodedPlaces, count: int, size: int) -> tuple[Tensor, Tensor]:
    """The mask (k, m), and which rows (k) are valid: exactly `count` positions, all inside the row."""
    rows, width = len(found.places), shortest(count, size)[1]
    if not width:
        bits = unpack_bits(found.places, 1, 8 * found.places.shape[1]).bool()
        kept, beyond = bits[:, :size], bits[:, size:].any(1)
    else:
        block, counts = BLOCKS[width], widen(found.counts, width)
        begins = torch.arange(counts.shape[1]).expand(rows, -1)
        kept, beyond = torch.zeros(rows, size, dtype=torch.bool), counts.sum(1) != count
        for row in (~beyond).nonzero().flatten().tolist():
            where = torch.repeat_interleave(begins[row], counts[row]) * block + widen(found.places[row], width)
            beyond[row] = bool((where >= size).any())
            kept[row, where.clamp_(max=size - 1)] = True
    good = ~beyond & (kept.sum(1) == count)
    kept[~good] = torch.arange(size) < count
    return kept, good


def narrow(numbers: Tensor, width: int) -> Tensor:
    """Whole numbers below 2^16 in one or two bytes. Two bytes are signed and wrap around: torch has few uint16
    operations."""
    return numbers.to(torch.uint8 if width == 1 else torch.int16)


def widen(numbers: Tensor, width: int) -> Tensor:
    return numbers.long() & (0xFF if width == 1 else 0xFFFF)
