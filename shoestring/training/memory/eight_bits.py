"""Numbers in 8 bits: blocks of 256, each with its largest as a scale, and codes that are finer near zero.

    signed      x = s sign(c) (c / 127)^2     c = round(127 sqrt(|x| / s))      off by at most 0.8 % of the block's largest
    positive    x = s (c / 255)^4             c = ceil(255 (x / s)^(1/4))       too large by at most 1.6 % of it, never too small

A second moment that is too small makes a step too large, so those are rounded up.
Dettmers et al.: 8-bit Optimizers via Block-wise Quantization, 2021, arXiv 2110.02861.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 256
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
    return held[: 4 * blocks].view(torch.float32), held[4 * blocks : blocks * (BLOCK + 4)].view(blocks, BLOCK)


def pack(numbers: Tensor, held: Tensor, positive: bool) -> None:
    """Write numbers into bytes."""
    flat = numbers.detach().reshape(-1).float()
    scales, codes = split(held, flat.numel())
    rows = functional.pad(flat, (0, codes.numel() - flat.numel())).view(codes.shape)
    scales.copy_(rows.abs().amax(1))
    parts = rows / scales.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(1)
    if positive:
        codes.copy_(parts.sqrt_().sqrt_().mul_(255).ceil_().clamp_(0, 255))
    else:
        codes.copy_((parts.sign() * parts.abs().sqrt_() * 127).round_() + 128)


def unpack(held: Tensor, count: int, positive: bool) -> Tensor:
    """The numbers in bytes."""
    scales, codes = split(held, count)
    if positive:
        rows = codes.float().div_(255).square_().square_()
    else:
        rows = codes.float().sub_(128).div_(127)
        rows = rows.abs().mul_(rows)
    return rows.mul_(scales.unsqueeze(1)).view(-1)[:count]
