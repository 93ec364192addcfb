"""Numbers on their way as affine codes of their blocks (numerics/block_quantization.py), a few bits each: how many bytes that takes.

A block whose range is no finite 32-bit number becomes numbers that are not finite: who receives it rejects it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoestring.numerics.bit_packing import EIGHT, pack_bits, packed_bytes, unpack_bits

WIDTHS = (8, 4, 2, 1)  # bits of a level that fill a byte
RANGE = 8  # bytes of a block's low and step


def levels_bytes(count: int, bits: int, block: int) -> int:
    """Of `count` numbers: their levels, how many levels of the last byte are none, and the ranges of their blocks.

    >>> levels_bytes(1000, bits=4, block=256), levels_bytes(1001, bits=4, block=256), levels_bytes(1000, bits=8, block=1024)
    (533, 534, 1008)
    """
    return packed_bytes(count, bits, EIGHT // bits) + (bits < EIGHT) + RANGE * -(-count // block)


def pack_levels(levels: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Levels (k, n), several a byte, and of every row how many levels of its last byte are none; (k, 0) if a level is a byte."""
    each = EIGHT // bits
    none = torch.full((len(levels), int(bits < EIGHT)), -levels.shape[1] % each, dtype=torch.uint8)
    return pack_bits(levels, bits, each), none


def unpack_levels(whole: Tensor, none: Tensor, bits: int) -> Tensor:
    """What `pack_levels` was given."""
    return unpack_bits(whole, bits, whole.shape[1] * EIGHT // bits - (int(none[0, 0]) if none.numel() else 0))
