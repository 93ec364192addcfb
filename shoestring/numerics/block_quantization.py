"""Block quantization: numbers as short codes. Every block has its own range, so a large number only reduces the
precision of its neighbours.

    symmetric    x ~ s c / 127                      s = max |x|,  c = round(127 x / s)              off by at most s / 254
    companded    x ~ s sign(c) (c / 127)^2          c = round(127 sign(x) sqrt(|x| / s))            finer near zero
                 x ~ s (c / 255)^4                  c = ceil(255 (x / s)^(1/4)),  x >= 0            never too small
    affine       x ~ low + step c                   low = min x,  step = (max x - low) / (2^b - 1),
                                                    c = floor((x - low) / step + u)
    grid         x ~ scale (c - zero)               zero is a code too, so that 0 is stored exactly

The affine codes with u = 1/2 are the nearest, at most step / 2 off; with u uniform in [0, 1) the mean is right, E[low +
step c] = x, and E|error|^2 = sum of step^2 f (1 - f), where f is the part of (x - low) / step behind the point. How
scales and codes are laid out, and what happens to NaN and infinity, is up to the caller.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor
from torch.nn import functional


def in_blocks(rows: Tensor, block: int, fill: float | None = None) -> Tensor:
    """(k, n) as (k, blocks, block). The last block is padded with its last number, which changes no range, or with
    `fill`.

    >>> in_blocks(torch.tensor([[1, 2, 3]]), 2).tolist(), in_blocks(torch.tensor([[1, 2, 3]]), 2, fill=0).tolist()
    ([[[1, 2], [3, 3]]], [[[1, 2], [3, 0]]])
    """
    lacking = -rows.shape[1] % block
    if lacking and fill is None:
        rows = torch.cat([rows, rows[:, -1:].expand(-1, lacking)], 1)
    elif lacking:
        rows = functional.pad(rows, (0, lacking), value=fill)
    return rows.view(len(rows), -1, block)


def per_number(values: Tensor, block: int, count: int) -> Tensor:
    """Expand one value per block (k, blocks) to one value per number (k, count).

    >>> per_number(torch.tensor([[1, 2]]), 2, 3).tolist()
    [[1, 1, 2]]
    """
    return values.repeat_interleave(block, 1)[:, :count]


# Symmetric and companded: blocks are rows (blocks, block), each with a scale (blocks, 1)


def largest(blocks: Tensor) -> Tensor:
    """max |x| of every block, (blocks, 1); NaN if a block contains NaN."""
    found: Tensor = torch.linalg.vector_norm(blocks, inf, dim=1, keepdim=True)
    return found


def symmetric_codes(blocks: Tensor, scales: Tensor) -> Tensor:
    """Whole numbers from -127 to 127, as floats; NaN in a block of zeros.

    >>> symmetric_codes(torch.tensor([[1.0, -2.0, 0.4]]), torch.tensor([[2.0]])).tolist()
    [[64.0, -127.0, 25.0]]
    """
    return (blocks / scales).mul_(127).round_()


def symmetric_values(codes: Tensor, scales: Tensor) -> Tensor:
    return (codes / 127).mul_(scales)


def companded_codes(blocks: Tensor, scales: Tensor, positive: bool) -> Tensor:
    """Whole numbers from -127 to 127, or from 0 to 255 if no number is negative, as floats; a block of zeros is zeros.

    >>> numbers = torch.tensor([[4.0, 1.0, 0.0]])
    >>> companded_codes(numbers, largest(numbers), positive=False).tolist()
    [[127.0, 64.0, 0.0]]
    >>> companded_codes(numbers, largest(numbers), positive=True).tolist()
    [[255.0, 181.0, 0.0]]
    """
    parts = blocks / scales.clamp_min(torch.finfo(scales.dtype).tiny)
    if positive:
        return parts.sqrt_().sqrt_().mul_(255).ceil_().clamp_(0, 255)
    return (parts.sign() * parts.abs().sqrt_() * 127).round_()


def companded_values(codes: Tensor, scales: Tensor, positive: bool) -> Tensor:
    """Decode companded codes, given as floats; they are overwritten."""
    if positive:
        return codes.div_(255).square_().square_().mul_(scales)
    parts = codes.div_(127)
    return parts.abs().mul_(parts).mul_(scales)


# Affine: rows (k, n) in blocks, with low and step (k, blocks). All operations are elementwise, so a row gets the same
# bits whatever the other rows are, on every machine.


def affine_ranges(rows: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor]:
    """Low and step of every block, (k, blocks) each.

    >>> affine_ranges(torch.tensor([[0.0, 3.0, 1.0, 1.0]]), bits=2, block=2)
    (tensor([[0., 1.]]), tensor([[1., 0.]]))
    """
    blocks = in_blocks(rows, block)
    low, high = blocks.amin(2) + 0.0, blocks.amax(2) + 0.0  # + 0: of -0 and 0, which compare equal, always the same one
    return low, (high - low) / ((1 << bits) - 1)


def affine_places(rows: Tensor, low: Tensor, step: Tensor, block: int) -> Tensor:
    """(x - low) / step, (k, n): codes before rounding."""
    blocks = (in_blocks(rows, block) - low[..., None]) / torch.where(step > 0, step, 1.0)[..., None]
    return blocks.flatten(1)[:, : rows.shape[1]]


def affine_codes(rows: Tensor, low: Tensor, step: Tensor, bits: int, block: int, offset: Tensor | float) -> Tensor:
    """(k, n) bytes; `offset`: u in the formula above, 1/2 or uniform draws (k, n)."""
    found = (affine_places(rows, low, step, block) + offset).floor_().nan_to_num_(0.0)
    return found.clamp_(0, (1 << bits) - 1).to(torch.uint8)


def affine_values(codes: Tensor, low: Tensor, step: Tensor, block: int) -> Tensor:
    blocks = in_blocks(codes, block).to(torch.float32) * step[..., None] + low[..., None]
    return blocks.flatten(1)[:, : codes.shape[1]].contiguous()


def affine_error(values: Tensor, bits: int, block: int) -> float:
    """E|error|^2 / |x|^2 of n numbers with stochastic rounding."""
    row = values[None].double()
    if not len(values) or not bool(row.any()):
        return 0.0
    low, step = affine_ranges(row, bits, block)
    found = affine_places(row, low, step, block)
    part = in_blocks(found - found.floor(), block)
    squares = (part * (1 - part)).sum(2) * step.square()
    # The last block is padded with its last number, which is counted once
    last = part[0, -1, -1] * (1 - part[0, -1, -1]) * (-len(values) % block) * step[0, -1].square()
    return (float(squares.sum()) - float(last)) / float(row.square().sum())


def worst_affine_error(count: int, bits: int, block: int) -> float:
    """The largest possible E|error|^2 / |x|^2 of n numbers: a block's range is at most sqrt(2) times its norm.

        n step^2 / 4  <=  n / (2 L^2)          L = 2^bits - 1

    >>> worst_affine_error(1024, bits=8, block=1024) == 1024 / (2 * 255**2)
    True
    """
    return min(count, block) / (2 * ((1 << bits) - 1) ** 2)


# Grid: rows (k, n) of codes, with scales and zeros (k, blocks); every row starts a new block


def grid_values(codes: Tensor, scales: Tensor, zeros: Tensor, block: int) -> Tensor:
    """scale (code - zero), in the dtype of the scales.

    >>> grid_values(torch.tensor([[0, 3, 1]]), torch.tensor([[0.5, 2.0]]), torch.tensor([[1.0, 0.0]]), block=2).tolist()
    [[-0.5, 1.0, 2.0]]
    """
    columns = codes.shape[1]
    block = min(block, max(columns, 1))  # a block may be longer than a row
    if columns % block == 0:
        parts = codes.view(len(codes), -1, block).to(scales.dtype)
        return parts.sub_(zeros[..., None]).mul_(scales[..., None]).view(len(codes), columns)
    parts = codes.to(scales.dtype)
    return (parts - per_number(zeros, block, columns)).mul_(per_number(scales, block, columns))
