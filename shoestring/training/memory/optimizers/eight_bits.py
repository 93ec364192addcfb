"""Optimizer moments in 8 bits: scales of blocks of 256, then their companded codes (numerics/block_quantization.py).

    signed      off by at most 0.8 % of the block's largest
    positive    too large by at most 1.6 % of it, never too small

A second moment that is too small makes a step too large, so those are rounded up.
Dettmers et al.: 8-bit Optimizers via Block-wise Quantization, 2021, arXiv 2110.02861.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoestring.numerics.block_quantization import companded_codes, companded_values, in_blocks, largest

BLOCK = 256
MIDDLE = 128  # added to the codes of signed numbers, which are then bytes
SIGNED = 0.008  # largest error of a signed number, of its block's largest
POSITIVE = 0.016  # the same of a positive one
DRIFT = 0.02  # that moments in 8 bits lead to (core/technique.py)
SQUARES = {
    "exp_avg_sq",
    "max_exp_avg_sq",
    "square_avg",
    "sum",
    "acc_delta",
    "exp_inf",
}  # moments that are never negative


SHARE = (BLOCK + 4) / BLOCK / 4  # bytes per byte of float32


def size(count: int) -> int:
    """Bytes of so many numbers.

    >>> size(256), size(257)
    (260, 520)
    """
    return -(-count // BLOCK) * (BLOCK + 4)


def split(held: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The scales and the codes in the bytes of so many numbers."""
    blocks = -(-count // BLOCK)
    return held[: 4 * blocks].view(torch.float32).unsqueeze(1), held[4 * blocks : blocks * (BLOCK + 4)].view(
        blocks, BLOCK
    )


def pack(numbers: Tensor, held: Tensor, positive: bool) -> None:
    """Write numbers into bytes."""
    flat = numbers.detach().reshape(-1).float()
    scales, codes = split(held, flat.numel())
    [rows] = in_blocks(flat[None], BLOCK, fill=0.0)
    scales.copy_(largest(rows))
    codes.copy_(companded_codes(rows, scales, positive).add_(0 if positive else MIDDLE))


def unpack(held: Tensor, count: int, positive: bool) -> Tensor:
    """The numbers in bytes."""
    scales, codes = split(held, count)
    return companded_values(codes.float().sub_(0 if positive else MIDDLE), scales, positive).view(-1)[:count]
