"""Rotate: a random rotation before quantization spreads an update's large numbers over their block.

    y = H D x / sqrt(b)          D random signs, H the Hadamard matrix of b = 1024          |y| = |x|, and x = D H y / sqrt(b)

A block's range becomes about 2 sqrt(2 ln b / b) of its norm, whatever x is. A partial last block is rotated together
with the end of the block before it, so no padding is sent; with fewer than 1024 numbers, b is the largest power of two
that they fill. Signs follow from the seed and the round, and are not sent. Additions in a fixed order give the same
bits everywhere. The stated error is that of one draw of signs; below about 50 numbers, other draws differ from it.
Suresh, Yu, Kumar, McMahan 2017, Distributed Mean Estimation with Limited Communication, arXiv 1611.00429.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import ClassVar

import torch
from torch import Tensor

from shoestring.federated.planning.evidence import cache_by_identity
from shoestring.federated.playing.plain import VALUES
from shoestring.federated.playing.seeds import generator_of
from shoestring.federated.round import DeviceView, EncodedUpdates, Order, Round, Updates
from shoestring.federated.technique import FederatedTechnique, RoundCost
from shoestring.federated.techniques.send.coding import device_noise_refusal, without_clip
from shoestring.federated.techniques.send.quantize import squared_errors

BLOCK = 1024
GAIN = 0.9  # the planner tries Rotate only if the error of 4 bits shrinks to this share or less


@dataclass(frozen=True)
class Rotate(FederatedTechnique):
    """Rotate an update at random before it is quantized.

    Costs: additions alone, n log b of them for n numbers in blocks of b.

    Not for: 8 bits a number, where the range of a block hardly matters, and updates that nothing quantizes.
    """

    why: ClassVar[str] = "a random rotation makes quantization lose less"
    seam: ClassVar[str] = "send"
    slot: ClassVar[str] = "rotate"
    needs: ClassVar[tuple[str, ...]] = ("QuantizeUpdates",)  # alone it saves no bytes
    order: ClassVar[int] = 42

    @classmethod
    def choices(cls, cost: RoundCost, /) -> tuple[Rotate, ...]:
        return (cls(),) if cost.evidence is None or gain(cost.evidence.values) <= GAIN else ()

    def refusal(self, cost: RoundCost, /) -> str:
        return device_noise_refusal(cost)

    def drift(self, cost: RoundCost, /) -> float:
        return 0.0  # except for rounding

    def cost(self, cost: RoundCost, /) -> RoundCost:
        return without_clip(
            replace(
                cost, evidence=cost.evidence and replace(cost.evidence, values=rotate_evidence(cost.evidence.values))
            )
        )

    def apply(self, subject: Round, /) -> Round:
        def encode(order: Order, devices: Sequence[DeviceView], updates: Updates) -> EncodedUpdates:
            sent = subject.encode(order, devices, updates)
            values = sent.payload[VALUES]
            return replace(
                sent, payload={**sent.payload, VALUES: rotate(values, *signs(order.seed, order.round, values.shape[1]))}
            )

        def decode(order: Order, sent: EncodedUpdates) -> Updates:
            values = sent.payload[VALUES]
            back = rotate_back(values, *signs(order.seed, order.round, values.shape[1]))
            return subject.decode(order, replace(sent, payload={**sent.payload, VALUES: back}))

        return subject.with_(encode=encode, decode=decode)


def block_of(size: int) -> int:
    """The largest power of two that is at most `size` and at most BLOCK.

    >>> block_of(1), block_of(1000), block_of(1_000_000)
    (1, 512, 1024)
    """
    return min(BLOCK, 1 << (size.bit_length() - 1))


def signs(seed: int, round: int, size: int) -> tuple[Tensor, Tensor]:
    """Random signs for all numbers, and for those at the end that are rotated once more."""
    drawn = torch.randint(0, 2, (size + block_of(size),), generator=generator_of(seed, "rotate", round)) * 2.0 - 1
    return drawn[:size], drawn[size:]


def rotate(values: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Rotate all whole blocks, then, if numbers are left over, the last `block` numbers of the row."""
    size, block = values.shape[1], len(second)
    whole, turned = size - size % block, values * first
    turned[:, :whole] = hadamard(turned[:, :whole], block)
    if whole < size:
        turned[:, size - block :] = hadamard(turned[:, size - block :] * second, block)
    return turned


def rotate_back(values: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """The inverse of `rotate`."""
    size, block = values.shape[1], len(second)
    whole, turned = size - size % block, values.clone()
    if whole < size:
        turned[:, size - block :] = hadamard(turned[:, size - block :], block) * second
    turned[:, :whole] = hadamard(turned[:, :whole], block)
    return turned * first


def hadamard(values: Tensor, block: int) -> Tensor:
    """Multiply every block of a row by H / sqrt(b): the fast Walsh-Hadamard transform, log2(b) passes of sums and
    differences."""
    found, half = values.reshape(-1, block), 1
    while half < block:
        pairs = found.view(-1, block // (2 * half), 2, half)
        found = torch.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2).view(-1, block)
        half *= 2
    return (found / sqrt(block)).view(values.shape)


@cache_by_identity
def rotate_evidence(values: Tensor) -> Tensor:
    """Rows (m, n) of the evidence, rotated with one draw of signs."""
    return rotate(values, *signs(0, 0, values.shape[1]))


@cache_by_identity
def gain(values: Tensor) -> float:
    """Quantization error of 4 bits with rotation, relative to the error without; 1 if there is no error."""
    plain = float(squared_errors(values, 4, BLOCK).sum())
    return float(squared_errors(rotate_evidence(values), 4, BLOCK).sum()) / plain if plain else 1.0
