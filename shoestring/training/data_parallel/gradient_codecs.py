"""Codecs: gradients as shorter messages. Of n float32 numbers in 4 n bytes remain

    CastCodec(fp16), CastCodec(bf16)   2 n                              half
    Int8                     n + 4 n / 1024                   a quarter
    TopKCodec(share)              4 share n + 4 n / 32768          at 1 % a hundredth

How long a message is follows from n alone, so traffic is known before anything is sent. It is a whole number of 4 bytes, so that
messages can stand one after another, and the same numbers give the same bytes. None is exact: what a message leaves
out is kept for the next one (feedback). What is not finite stays so, in its place or all over its block: a loss scale must see it.
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
    """Bounds are those of numbers above 1e-38: below, float32 itself loses digits. A message is made by `numbers.new_empty`,
    so that it is fake where the numbers are.
    """

    @property
    def error(self) -> float: ...  # a bound; each codec says of what
    def size(self, count: int) -> int: ...  # bytes of the message of so many numbers
    def encode(self, numbers: Tensor, into: Tensor) -> None: ...  # flat float32 into uint8 of that size
    def decode(self, message: Tensor, count: int) -> Tensor: ...  # flat float32
    def add(self, message: Tensor, total: Tensor, times: float = 1.0) -> None: ...  # total += times * decoded


@dataclass(frozen=True)
class CastCodec:
    """Every number as a shorter float. What is beyond the range of that (fp16: 65,504) becomes the end of the range."""

    dtype: torch.dtype

    @property
    def error(self) -> float:
        """Of each number within the range; near zero the dtype's smallest number where that is more."""
        return torch.finfo(self.dtype).eps / 2

    def size(self, count: int) -> int:
        return padded(2 * count)

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
        """Of the largest of the number's block."""
        return 1 / 254

    def size(self, count: int) -> int:
        """
        >>> Int8Codec().size(1024), Int8Codec().size(1025)
        (1028, 1036)
        """
        return 4 * ceil(count / self.block) + padded(count)

    def encode(self, numbers: Tensor, into: Tensor) -> None:
        for scales, codes, rows in self.parts(into, numbers):
            scales.copy_(largest(rows))
            # NaN may become any code: the scale is then zero or not finite, and decides
            codes.copy_(symmetric_codes(rows, scales))
        into[4 * ceil(numbers.numel() / self.block) + numbers.numel() :].zero_()

    def decode(self, message: Tensor, count: int) -> Tensor:
        return decoded(self, message, count)

    def add(self, message: Tensor, total: Tensor, times: float = 1.0) -> None:
        for scales, codes, rows in self.parts(message, total):
            rows.add_(symmetric_values(codes, scales), alpha=times)

    def parts(self, message: Tensor, numbers: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Scales, codes and numbers, a block a row: first the whole blocks, then the shorter one at the end."""
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
    """Only the k = ceil(share n) numbers that are largest by magnitude, as bf16, and their places.

    Places are sent in order, each as its distance from the beginning of its page of 32,768, with the number of places up to each
    page's end: 2 bytes a place instead of 4, and a size that does not depend on which places they are.

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
        """Of the whole vector, in the Euclidean norm (Stich et al. 2018, arXiv 1809.07599):

        |x - decoded|^2  <=  |left out|^2 + e^2 |sent|^2  <=  (1 - (1 - e^2) share) |x|^2        e = 2^-8 of bf16
        """
        return sqrt(1 - (1 - VALUES.error**2) * self.share)

    def kept(self, count: int) -> int:
        return ceil(self.share * count)

    def size(self, count: int) -> int:
        """
        >>> TopKCodec().size(1_000_000)
        40124
        """
        return 4 * ceil(count / PAGE) + VALUES.size(self.kept(count)) + padded(2 * self.kept(count))

    def encode(self, numbers: Tensor, into: Tensor) -> None:
        ends, values, inside = self.split(into, numbers.numel())
        places = top_k_places(numbers, self.kept(numbers.numel()))
        pages = torch.arange(1, len(ends) + 1, device=numbers.device) * PAGE
        ends.copy_(torch.searchsorted(places, pages))
        VALUES.encode(numbers[places], values)
        inside[: len(places)].copy_(places % PAGE)
        inside[len(places) :].zero_()

    def decode(self, message: Tensor, count: int) -> Tensor:
        return decoded(self, message, count)

    def add(self, message: Tensor, total: Tensor, times: float = 1.0) -> None:
        ends, values, inside = self.split(message, total.numel())
        kept = self.kept(total.numel())
        pages = torch.searchsorted(ends, torch.arange(kept, dtype=torch.int32, device=total.device), right=True)
        total.index_add_(0, pages * PAGE + inside[:kept], VALUES.decode(values, kept), alpha=times)

    def split(self, message: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """How many places there are up to the end of each page; the values; the places inside their pages."""
        first = 4 * ceil(count / PAGE)
        second = first + VALUES.size(self.kept(count))
        return message[:first].view(torch.int32), message[first:second], message[second:].view(torch.int16)


def padded(size: int) -> int:
    """The next whole number of 4 bytes."""
    return (size + 3) // 4 * 4


def decoded(codec: Codec, message: Tensor, count: int) -> Tensor:
    total = message.new_zeros(count, dtype=torch.float32)
    codec.add(message, total)
    return total


PAGE = 1 << 15
VALUES = CastCodec(torch.bfloat16)  # of TopK: the range of float32, and no scale to send
CODECS: dict[str, Codec] = {
    "fp16": CastCodec(torch.float16),
    "bf16": CastCodec(torch.bfloat16),
    "int8": Int8Codec(),
    "topk": TopKCodec(),
}
