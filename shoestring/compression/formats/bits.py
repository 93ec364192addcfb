"""Small whole numbers in a stream of bits: eight numbers of b bits are b bytes."""

from __future__ import annotations

import torch
from torch import Tensor

EIGHT = 8  # numbers that are packed together, and bits of a byte
PIECE = 1 << 18  # numbers that are packed at once: on the way each takes eight bytes


def packed_bytes(count: int, bits: int) -> int:
    """Bytes that hold `count` numbers of `bits` bits.

    >>> packed_bytes(10, 3)
    6
    """
    return -(-count // EIGHT) * bits if bits < EIGHT else count


def packed(codes: Tensor, bits: int) -> Tensor:
    """The numbers as bytes, the first in the lowest bits. They must be below 2 ** bits; the last eight are filled up
    with zeros.

    >>> packed(torch.tensor([1, 2, 3]), 4).tolist()
    [33, 3, 0, 0]
    """
    flat = codes.reshape(-1)
    if bits == EIGHT:
        return flat.to(torch.uint8)
    if not len(flat):
        return torch.zeros(0, dtype=torch.uint8)
    return torch.cat([packed_piece(piece, bits) for piece in flat.split(PIECE)])


def packed_piece(flat: Tensor, bits: int) -> Tensor:
    rows = torch.zeros(-(-len(flat) // EIGHT) * EIGHT, dtype=torch.int64)
    rows[: len(flat)] = flat.to(torch.int64)
    words = (rows.view(-1, EIGHT) << shifts(bits)).sum(1)  # (eights): up to 56 bits in use
    return ((words[:, None] >> (EIGHT * torch.arange(bits))) & 255).to(torch.uint8).reshape(-1)


def unpacked(stream: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` numbers of a stream, as bytes.

    >>> unpacked(packed(torch.tensor([1, 2, 3]), 5), 5, 3).tolist()
    [1, 2, 3]
    """
    if bits == EIGHT:
        return stream[:count]
    if bits == 4:
        return torch.stack((stream & 15, stream >> 4), -1).reshape(-1)[:count]
    if bits == 2:
        return torch.stack((stream & 3, (stream >> 2) & 3, (stream >> 4) & 3, stream >> 6), -1).reshape(-1)[:count]
    if bits == 1:
        return ((stream[:, None] >> torch.arange(EIGHT, dtype=torch.uint8, device=stream.device)) & 1).reshape(-1)[
            :count
        ]
    pieces = stream.split(PIECE // EIGHT * bits)
    return torch.cat([unpacked_piece(piece, bits) for piece in pieces])[:count]


def unpacked_piece(stream: Tensor, bits: int) -> Tensor:
    words = torch.zeros(len(stream) // bits, dtype=torch.int64, device=stream.device)
    for place, column in enumerate(stream.view(-1, bits).unbind(1)):
        words |= column.to(torch.int64) << (EIGHT * place)
    return ((words[:, None] >> shifts(bits).to(stream.device)) & ((1 << bits) - 1)).to(torch.uint8).reshape(-1)


def shifts(bits: int) -> Tensor:
    return bits * torch.arange(EIGHT)
