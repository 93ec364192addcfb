"""Numbers as whole levels between the least and the largest of their block, a few bits each.

    step = (high - low) / L          L = 2^bits - 1, of every block
    level = floor((x - low) / step + u)          u uniform in [0, 1): E[low + step level] = x          u = 1/2: the nearest level
    E|error|^2 = sum of step^2 f (1 - f)         f: the part of (x - low) / step behind the point; at most step^2 / 4 a number

A block whose range is no finite 32-bit number becomes numbers that are not finite: who receives it rejects it.
All of it is done number by number, so a row gets the same bits among other rows and on every machine.
"""

from __future__ import annotations

import torch
from torch import Tensor

SHIFTS = {8: (0,), 4: (0, 4), 2: (0, 2, 4, 6), 1: tuple(range(8))}  # where the levels of a byte begin
RANGE = 8  # bytes of a block's low and step


def levels_bytes(count: int, bits: int, block: int) -> int:
    """Of `count` numbers: their levels, how many levels of the last byte are none, and the ranges of their blocks.

    >>> levels_bytes(1000, bits=4, block=256), levels_bytes(1001, bits=4, block=256), levels_bytes(1000, bits=8, block=1024)
    (533, 534, 1008)
    """
    return -(-count * bits // 8) + (bits < 8) + RANGE * -(-count // block)


def in_blocks(values: Tensor, block: int) -> Tensor:
    """(k, n) as (k, blocks, block): the last one is filled up with its last number, which changes no range."""
    lacking = -values.shape[1] % block
    filled = torch.cat([values, values[:, -1:].expand(-1, lacking)], 1) if lacking else values
    return filled.view(len(values), -1, block)


def ranges(values: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor]:
    """Low and step of every block, (k, blocks) each."""
    blocks = in_blocks(values, block)
    low, high = blocks.amin(2) + 0.0, blocks.amax(2) + 0.0  # + 0: of -0 and 0, which are equal, always the same one
    return low, (high - low) / ((1 << bits) - 1)


def scaled(values: Tensor, low: Tensor, step: Tensor, block: int) -> Tensor:
    """(x - low) / step, (k, n)."""
    blocks = (in_blocks(values, block) - low[..., None]) / torch.where(step > 0, step, 1.0)[..., None]
    return blocks.flatten(1)[:, : values.shape[1]]


def levels(values: Tensor, low: Tensor, step: Tensor, bits: int, block: int, offset: Tensor | float) -> Tensor:
    """(k, n) bytes; `offset`: u in the formula above."""
    found = (scaled(values, low, step, block) + offset).floor_().nan_to_num_(0.0)
    return found.clamp_(0, (1 << bits) - 1).to(torch.uint8)


def restored(found: Tensor, low: Tensor, step: Tensor, block: int) -> Tensor:
    blocks = in_blocks(found, block).to(torch.float32) * step[..., None] + low[..., None]
    return blocks.flatten(1)[:, : found.shape[1]].contiguous()


def packed(found: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Levels, several a byte, and of every row how many levels of its last byte are none; (k, 0) if a level is a byte."""
    shifts = SHIFTS[bits]
    lacking = -found.shape[1] % len(shifts)
    split = torch.nn.functional.pad(found, (0, lacking)).view(len(found), -1, len(shifts))
    whole = torch.zeros(split.shape[:2], dtype=torch.uint8)
    for place, shift in enumerate(shifts):
        whole |= split[..., place] << shift
    return whole, torch.full((len(found), int(bits < 8)), lacking, dtype=torch.uint8)


def unpacked(whole: Tensor, none: Tensor, bits: int) -> Tensor:
    """What `packed` was given."""
    split = torch.stack([(whole >> shift) & ((1 << bits) - 1) for shift in SHIFTS[bits]], 2).flatten(1)
    return split[:, : split.shape[1] - int(none[0, 0])] if none.numel() else split


def expected_error(values: Tensor, bits: int, block: int) -> float:
    """E|error|^2 / |x|^2 of numbers (n) that are rounded at random."""
    row = values[None].double()
    if not len(values) or not bool(row.any()):
        return 0.0
    low, step = ranges(row, bits, block)
    found = scaled(row, low, step, block)
    part = in_blocks(found - found.floor(), block)
    squares = (part * (1 - part)).sum(2) * step.square()
    # The last block is filled up with its last number, which is counted once
    last = part[0, -1, -1] * (1 - part[0, -1, -1]) * (-len(values) % block) * step[0, -1].square()
    return (float(squares.sum()) - float(last)) / float(row.square().sum())


def worst_error(count: int, bits: int, block: int) -> float:
    """The largest |error|^2 / |x|^2 that n numbers can have: a block's range is at most sqrt(2) of its norm.

    n step^2 / 4  <=  n / (2 L^2)
    """
    return min(count, block) / (2 * ((1 << bits) - 1) ** 2)
