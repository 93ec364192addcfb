"""Codecs: shorter messages for gradients. Bytes for n float32 numbers, which take 4 n uncompressed:

    CastCodec(fp16), CastCodec(bf16)   2 n                              half
    Int8                     n + 4 n / 1024                   a quarter
    TopKCodec(share)              4 share n + 4 n / 32768          at 1 % a hundredth

A message's length depends on n alone, so traffic is known in advance. It is a multiple of 4 bytes, so that messages can
be concatenated. The same numbers give the same bytes. No codec is exact: what a message leaves out is added to the next
one (error feedback). NaN and infinity stay non-finite, in place or in their whole block, because a loss scale must see
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, nan, sqrt
from typing import Protocol

import torch
from torch import Tensor

from shoestring.core.errors import Mistake
from shoestring.numerics.block_quantization import largest, symmetric_codes, symmetric_values
from shoestring.numerics.top_k import top_k_places


class Codec(Protocol):
    """Error bounds hold for numbers above 1e-38; below, float32 itself loses digits. Messages are allocated by
    `numbers.new_empty`, so that they are fake if the numbers are.
    """

    @property
    def error(self) -> float: ...  # an error bound; each codec says relative to what
    def size(self, count: int) -> int: ...  # bytes of a message for this many numbers
    def encode(self, numbers: Tensor, into: Tensor) -> None: ...  # flat float32 into uint8 of that size
    def decode(self, message: Tensor, count: int) -> Tensor: ...  # flat float32
    def add(self, message: Tensor, total: Tensor, times: float = 1.0) -> None: ...  # total += times * decoded


@dataclass(frozen=True)
class CastCodec:
    """Every number in a shorter float dtype. Numbers beyond its range (fp16: 65,504) become its largest number."""

    dtype: torch.dtype

    @property
    def error(self) -> float:
        """Relative to each number within the range; near zero, the dtype's smallest number if that is larger."""
        return torch.finfo(self.dtype).eps / 2

    def size(self, count: int) -> int:
        return pad_size(2 * count)

    def encode(self, numbers: Tensor, into: Tensor) -> None:
        limit, used = torch.finfo(self.dtype).max, 2 * numbers.numel()
        into[:used].view(self.dtype).copy_(numbers.clamp(-limit, limit)).masked_fill_(numbers.isinf(), nan)
        into[used:].zero_()

    def decode(self, message: Tensor, count: int) -> Tensor:
        return message[: 2 * count].view(self.dtype).float()

    def add(self, message: Tensor, total: Tensor, times: float = 1.0) -> None:
        total.add_(message[: 2 * total.numel()].view(self.dtype), alpha=times)


@dataclass(frozen=True)
class Int8Codec:
    """Blocks of numbers, each with its largest as a scale s:  c = round(127 x / s),  x = s c / 127.

    Dettmers: 8-Bit Approximations for Parallelism in Deep Learning, 2015, arXiv 1511.04561.
    """

    block: int = 1024

    @property
    def error(self) -> float:
        """Relative to the largest number of the block."""
        return 1 / 254

    def size(self, count: int) -> int:
        """
        >>> Int8Codec().size(1024), Int8Codec().size(1025)
        (1028, 1036)
        """
        return 4 * ceil(count / self.block) + pad_size(count)

    def encode(self, numbers: Tensor, into: Tensor) -> None:
        for scales, codes, rows in self.parts(into, numbers):
            scales.copy_(largest(rows))
            # NaN may become any code: then the scale is zero or not finite, which decides
            codes.copy_(symmetric_codes(rows, scales))
        into[4 * ceil(numbers.numel() / self.block) + numbers.numel() :].zero_()

    def decode(self, message: Tensor, count: int) -> Tensor:
        return decode(self, message, count)

    def add(self, message: Tensor, total: Tensor, times: float = 1.0) -> None:
        for scales, codes, rows in self.parts(message, total):
            rows.add_(symmetric_values(codes, scales), alpha=times)

    def parts(self, message: Tensor, numbers: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Scales, codes and numbers with one block per row: the whole blocks first, then the shorter last one."""
        count, whole = numbers.numel(), numbers.numel() // self.block
        blocks, end = ceil(count / self.block), whole * self.block
        scales = message[: 4 * blocks].view(torch.float32).unsqueeze(1)
        codes = message[4 * blocks : 4 * blocks + count].view(torch.int8)
        if whole:
            yield scales[:whole], codes[:end].view(whole, -1), numbers[:end].view(whole, -1)
        if end < count:
            yield scales[whole:], codes[end:].view(1, -1), numbers[end:].view(1, -1)


@dataclass(frozen=True)
class TopKCodec:
    """The k = ceil(share n) largest numbers by magnitude, as bf16, with their positions.

    Positions are sent in order, as offsets within pages of 32,768 numbers, with the count of positions up to the end of
    each page. So a position takes 2 bytes instead of 4, and the size does not depend on which positions they are.

    Aji, Heafield: Sparse Communication for Distributed Gradient Descent, 2017, arXiv 1704.05021.
    """

    share: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise Mistake(
                f"a share of {self.share} of the gradient can't be sent: it must be above 0 and at most 1; 0.01 is usual"
            )

    @property
    def error(self) -> float:
        """Relative to the whole vector, in the Euclidean norm (Stich et al. 2018, arXiv 1809.07599):

        |x - decoded|^2  <=  |left out|^2 + e^2 |sent|^2  <=  (1 - (1 - e^2) share) |x|^2        e = 2^-8 of bf16
        """
        return sqrt(1 - (1 - VALUES.error**2) * self.share)

    def kept_count(self, count: int) -> int:
        return ceil(self.share * count)

    def size(self, count: int) -> int:
        """
        >>> TopKCodec().size(1_000_000)
        40124
        """
        return 4 * ceil(count / PAGE) + VALUES.size(self.kept_count(count)) + pad_size(2 * self.kept_count(count))

    def encode(self, numbers: Tensor, into: Tensor) -> None:
        ends, values, inside = self.split(into, numbers.numel())
        places = top_k_places(numbers, self.kept_count(numbers.numel()))
        pages = torch.arange(1, len(ends) + 1, device=numbers.device) * PAGE
        ends.copy_(torch.searchsorted(places, pages))
        VALUES.encode(numbers[places], values)
        inside[: len(places)].copy_(places % PAGE)
        inside[len(places) :].zero_()

    def decode(self, message: Tensor, count: int) -> Tensor:
        return decode(self, message, count)

    def add(self, message: Tensor, total: Tensor, times: float = 1.0) -> None:
        ends, values, inside = self.split(message, total.numel())
        kept = self.kept_count(total.numel())
        pages = torch.searchsorted(ends, torch.arange(kept, dtype=torch.int32, device=total.device), right=True)
        total.index_add_(0, pages * PAGE + inside[:kept], VALUES.decode(values, kept), alpha=times)

    def split(self, message: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Number of positions up to the end of each page; the values; the offsets within pages."""
        first = 4 * ceil(count / PAGE)
        second = first + VALUES.size(self.kept_count(count))
        return message[:first].view(torch.int32), message[first:second], message[second:].view(torch.int16)


def pad_size(size: int) -> int:
    """The next multiple of 4 bytes."""
    return (size + 3) // 4 * 4


def decode(codec: Codec, message: Tensor, count: int) -> Tensor:
    total = message.new_zeros(count, dtype=torch.float32)
    codec.add(message, total)
    return total


PAGE = 1 << 15
VALUES = CastCodec(torch.bfloat16)  # for TopK: the range of float32, without a scale to send
CODECS: dict[str, Codec] = {
    "fp16": CastCodec(torch.float16),
    "bf16": CastCodec(torch.bfloat16),
    "int8": Int8Codec(),
    "topk": TopKCodec(),
}
