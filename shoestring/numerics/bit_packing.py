"""Pack small integers into bytes: eight numbers of b bits take b bytes, the first number in the lowest bits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

EIGHT = 8  # this many numbers of any width fill whole bytes
PIECE = 1 << 18  # numbers of 3, 5, 6 or 7 bits packed at once: temporarily each takes eight bytes


def packed_bytes(count: int, bits: int, multiple: int | None = None) -> int:
    """Bytes for `count` numbers of `bits` bits, padded to a multiple of `multiple` numbers (see `pack_bits`).

    >>> packed_bytes(10, 3), packed_bytes(9, 4), packed_bytes(9, 4, multiple=2)
    (6, 8, 5)
    """
    each = padding_multiple(bits, multiple)
    return -(-count // each) * each * bits // EIGHT


def pack_bits(codes: Tensor, bits: int, multiple: int | None = None) -> Tensor:
    """Whole numbers below 2^bits (..., n) as bytes (..., packed_bytes(n, bits, multiple)).

    Every row is padded with zeros to a multiple of `multiple` numbers; by default eight, so that a row of any width
    ends with a whole byte. Numbers of 8 bits need no padding.

    >>> pack_bits(torch.tensor([1, 2, 3]), 4).tolist(), pack_bits(torch.tensor([[1, 2, 3], [4, 5, 6]]), 4, multiple=2).tolist()
    ([33, 3, 0, 0], [[33, 3], [84, 6]])
    """
    if bits == EIGHT:
        return codes.to(torch.uint8)
    rows = functional.pad(codes.to(torch.uint8), (0, -codes.shape[-1] % padding_multiple(bits, multiple)))
    if EIGHT % bits == 0:
        each = EIGHT // bits
        places = rows.view(*rows.shape[:-1], rows.shape[-1] // each, each).unbind(-1)
        whole = places[0].clone()
        for number, codes_there in enumerate(places[1:], 1):
            whole |= codes_there << (bits * number)
        return whole
    return torch.cat([pack_words(piece, bits) for piece in rows.split(PIECE, -1)], -1)


def unpack_bits(stream: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` numbers of every row of a stream (..., bytes), as bytes (..., count).

    >>> unpack_bits(pack_bits(torch.tensor([1, 2, 3]), 5), 5, 3).tolist()
    [1, 2, 3]
    """
    if bits == EIGHT:
        return stream[..., :count]
    if EIGHT % bits == 0:
        top, most = EIGHT - bits, (1 << bits) - 1
        places = [stream & most, *((stream >> shift) & most for shift in range(bits, top, bits)), stream >> top]
        return torch.stack(places, -1).flatten(-2)[..., :count]
    pieces = stream.split(PIECE // EIGHT * bits, -1)
    return torch.cat([unpack_words(piece, bits) for piece in pieces], -1)[..., :count]


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """In words of eight numbers, which use at most 56 bits."""
    eights = codes.view(*codes.shape[:-1], codes.shape[-1] // EIGHT, EIGHT).to(torch.int64)
    words = (eights << shifts(bits, codes)).sum(-1, keepdim=True)
    return ((words >> (EIGHT * torch.arange(bits, device=codes.device))) & 255).to(torch.uint8).flatten(-2)


def unpack_words(stream: Tensor, bits: int) -> Tensor:
    words = torch.zeros(*stream.shape[:-1], stream.shape[-1] // bits, dtype=torch.int64, device=stream.device)
    for place, column in enumerate(stream.view(*words.shape, bits).unbind(-1)):
        words |= column.to(torch.int64) << (EIGHT * place)
    return ((words[..., None] >> shifts(bits, stream)) & ((1 << bits) - 1)).to(torch.uint8).flatten(-2)


def shifts(bits: int, like: Tensor) -> Tensor:
    """The bit positions of a word's numbers."""
    return bits * torch.arange(EIGHT, device=like.device)


def padding_multiple(bits: int, multiple: int | None) -> int:
    found = multiple or (EIGHT if bits < EIGHT else 1)
    assert found * bits % EIGHT == 0, f"{found} numbers of {bits} bits end within a byte"
    return found
