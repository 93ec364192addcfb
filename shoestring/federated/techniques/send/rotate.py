"""Rotate: an update is turned at random before it is quantized, so that no number of a block is much larger than the others.

    y = H D x / sqrt(b)          D random signs, H the Hadamard matrix of b = 1024          |y| = |x|, and x = D H y / sqrt(b)

A block's range becomes about 2 sqrt(2 ln b / b) of its norm, whatever x is. What does not fill the last block is turned with the end of
the block before it, so no number is added; below 1024 numbers b is the largest power of two that they fill. Signs follow from the seed
and the round, and are not sent. Done by additions alone, in a fixed order: the same bits everywhere. The error that is stated is that of
one draw of signs; of few numbers (below 50 or so) others differ.
Suresh, Yu, Kumar, McMahan 2017, Distributed Mean Estimation with Limited Communication, arXiv 1611.00429.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import ClassVar

import torch
from torch import Tensor

from shoestring.federated.evidence import remembered
from shoestring.federated.plain import VALUES
from shoestring.federated.round import DeviceView, Order, Round, Sent, Updates
from shoestring.federated.seeds import generator_of
from shoestring.federated.technique import FederatedTechnique, RoundCost
from shoestring.federated.techniques.send.coding import device_noise, unlimited
from shoestring.federated.techniques.send.quantize import squared_errors

BLOCK = 1024
GAIN = 0.9  # the error of 4 bits must become at least so much smaller for the chooser to try it


@dataclass(frozen=True)
class Rotate(FederatedTechnique):
    """Rotate an update at random before it is quantized.

    Costs: additions alone, n log b of them for n numbers in blocks of b.

    Not for: 8 bits a number, where the range of a block hardly matters, and updates that nothing quantizes.
    """

    why: ClassVar[str] = "turned at random, a few bits a number lose less"
    seam: ClassVar[str] = "send"
    slot: ClassVar[str] = "rotate"
    needs: ClassVar[tuple[str, ...]] = ("QuantizeUpdates",)  # alone it saves nothing
    order: ClassVar[int] = 42

    @classmethod
    def choices(cls, cost: RoundCost, /) -> tuple[Rotate, ...]:
        return (cls(),) if cost.evidence is None or gain(cost.evidence.values) <= GAIN else ()

    def refusal(self, cost: RoundCost, /) -> str:
        return device_noise(cost)

    def drift(self, cost: RoundCost, /) -> float:
        return 0.0  # but for rounding

    def cost(self, cost: RoundCost, /) -> RoundCost:
        return unlimited(
            replace(cost, evidence=cost.evidence and replace(cost.evidence, values=turned(cost.evidence.values)))
        )

    def apply(self, subject: Round, /) -> Round:
        def encode(order: Order, devices: Sequence[DeviceView], updates: Updates) -> Sent:
            sent = subject.encode(order, devices, updates)
            values = sent.payload[VALUES]
            return replace(
                sent,
                payload={**sent.payload, VALUES: rotated(values, *signs(order.seed, order.round, values.shape[1]))},
            )

        def decode(order: Order, sent: Sent) -> Updates:
            values = sent.payload[VALUES]
            back = rotated_back(values, *signs(order.seed, order.round, values.shape[1]))
            return subject.decode(order, replace(sent, payload={**sent.payload, VALUES: back}))

        return subject.with_(encode=encode, decode=decode)


def block_of(size: int) -> int:
    """The largest power of two that is no more than that, or than BLOCK.

    >>> block_of(1), block_of(1000), block_of(1_000_000)
    (1, 512, 1024)
    """
    return min(BLOCK, 1 << (size.bit_length() - 1))


def signs(seed: int, round: int, size: int) -> tuple[Tensor, Tensor]:
    """Of all numbers, and of those at the end that are turned once more."""
    drawn = torch.randint(0, 2, (size + block_of(size),), generator=generator_of(seed, "rotate", round)) * 2.0 - 1
    return drawn[:size], drawn[size:]


def rotated(values: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Whole blocks, then, if they do not fill all, the last block's length at the end: two turns, one after the other."""
    size, block = values.shape[1], len(second)
    whole, turned = size - size % block, values * first
    turned[:, :whole] = hadamard(turned[:, :whole], block)
    if whole < size:
        turned[:, size - block :] = hadamard(turned[:, size - block :] * second, block)
    return turned


def rotated_back(values: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """The inverse of `rotated`."""
    size, block = values.shape[1], len(second)
    whole, turned = size - size % block, values.clone()
    if whole < size:
        turned[:, size - block :] = hadamard(turned[:, size - block :], block) * second
    turned[:, :whole] = hadamard(turned[:, :whole], block)
    return turned * first


def hadamard(values: Tensor, block: int) -> Tensor:
    """Every block of a row times H / sqrt(b), by sums and differences of halves: log2(b) passes."""
    found, half = values.reshape(-1, block), 1
    while half < block:
        pairs = found.view(-1, block // (2 * half), 2, half)
        found = torch.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2).view(-1, block)
        half *= 2
    return (found / sqrt(block)).view(values.shape)


@remembered
def turned(values: Tensor) -> Tensor:
    """Rows (m, n) as some round would turn them."""
    return rotated(values, *signs(0, 0, values.shape[1]))


@remembered
def gain(values: Tensor) -> float:
    """What is left of the error of 4 bits; 1 if there is none."""
    plain = float(squared_errors(values, 4, BLOCK).sum())
    return float(squared_errors(turned(values), 4, BLOCK).sum()) / plain if plain else 1.0
