"""Bytes of numbers that are sent as affine codes of a few bits per block (numerics/block_quantization.py).

If the range of a block is not a finite 32-bit number, its numbers decode to non-finite ones, and the receiver rejects
them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoestring.numerics.bit_packing import EIGHT, pack_bits, packed_bytes, unpack_bits

WIDTHS = (8, 4, 2, 1)  # bits of a level, where levels fill whole bytes
RANGE = 8  # bytes of a block's low and step


def levels_bytes(count: int, bits: int, block: int) -> int:
    """Bytes for `count` numbers: their levels, the number of unused levels in the last byte, and the ranges of their
    blocks.

    >>> levels_bytes(1000, bits=4, block=256), levels_bytes(1001, bits=4, block=256), levels_bytes(1000, bits=8, block=1024)
    (533, 534, 1008)
    """
    return packed_bytes(count, bits, EIGHT // bits) + (bits < EIGHT) + RANGE * -(-count // block)


def pack_levels(levels: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Pack levels (k, n), several per byte; also returns per row the number of unused levels in its last byte, or (k,
    0) if a level takes a whole byte."""
    each = EIGHT // bits
    none = torch.full((len(levels), int(bits < EIGHT)), -levels.shape[1] % each, dtype=torch.uint8)
    return pack_bits(levels, bits, each), none


def unpack_levels(whole: Tensor, none: Tensor, bits: int) -> Tensor:
    """The inverse of `pack_levels`."""
    return unpack_bits(whole, bits, whole.shape[1] * EIGHT // bits - (int(none[0, 0]) if none.numel() else 0))
