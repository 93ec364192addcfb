"""Rounding to a grid so that what a layer computes changes least.

A row w of a weight is multiplied with inputs x, whose second moment M = sum of x x^T is known from a calibration. Its rounding q costs

    (w - q) M (w - q)^T

Columns are rounded one by one, and what each is off is made up for by those that are not rounded yet: with U the upper Cholesky factor of
M^-1, the error e = (w_j - q_j) / U_jj is taken off as w_k -= e U_jk for k > j. Frantar, Ashkboos, Hoefler, Alistarh 2023, "GPTQ: Accurate
Post-Training Quantization for Generative Pre-trained Transformers", arXiv 2210.17323 (after Hassibi, Stork 1993, "Optimal Brain Surgeon").

Rows do not depend on each other, so that several grids (of 8, 4, 3 ... bits) are rounded at once, as more rows.
Measured on MiniLM (22.7 M weights, 1 - cosine of sentence embeddings, all linear layers, groups of 64): 4 bits .010 against .034 by
rounding to the nearest, 3 bits .041 against .119.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

DAMPING = 0.01    # of the mean second moment, added to all of them: inputs that were never seen are not free
BLOCK = 128       # columns whose effects on later ones are added up before they are applied
SHRINKS = (1.0, 0.94, 0.88, 0.82, 0.75, 0.68)   # of the range of a group that are tried for its grid
LEAST_SCALE = 6e-8     # the smallest number that float16 has
LARGEST = 65504.0      # and the largest
ROWS = 1 << 22         # numbers that are rounded at once, which bounds memory


class Setting(NamedTuple):
    bits: int
    group: int


class Rounded(NamedTuple):
    """A weight (rows, columns) on a grid."""

    codes: Tensor     # (rows, columns), uint8
    scales: Tensor    # (rows, groups), float16
    zeros: Tensor     # (rows, groups), uint8
    error: float      # (w - q) M (w - q)^T over all rows, by the mean input; without M, |w - q|^2


def rounded(weight: Tensor, settings: Sequence[Setting], moment: Tensor | None = None, mask: Tensor | None = None) -> list[Rounded]:
    """A weight (rows, columns) on each of several grids. `moment` (columns, columns): of its inputs; without it, to the nearest.
    `mask`: numbers that are not zero, others stay zero."""
    made = []
    at_once = max(1, ROWS // max(weight.shape[1] * weight.shape[0], 1))
    for first in range(0, len(settings), at_once):
        made += rounded_together(weight, settings[first:first + at_once], moment, mask)
    return made


def rounded_together(weight: Tensor, settings: Sequence[Setting], moment: Tensor | None, mask: Tensor | None) -> list[Rounded]:
    rows, columns = weight.shape
    weight = weight.detach().float()
    importance = None if moment is None else moment.diagonal().float().clamp(min=0)
    grids = [grid(weight, setting, importance) for setting in settings]
    scales = torch.cat([spread(scale.float(), setting.group, columns) for (scale, _), setting in zip(grids, settings, strict=True)])
    zeros = torch.cat([spread(zero, setting.group, columns) for (_, zero), setting in zip(grids, settings, strict=True)])
    top = torch.cat([torch.full((rows, 1), float(2 ** setting.bits - 1)) for setting in settings])
    whole = weight.repeat(len(settings), 1)
    kept = None if mask is None else mask.repeat(len(settings), 1)
    if moment is None:
        codes = coded(whole, scales, zeros, top)
        codes = codes if kept is None else torch.where(kept, codes, zeros)
    else:
        codes = compensated(whole, scales, zeros, top, moment, kept)
    off = (codes - zeros) * scales - whole
    metric = None if moment is None else moment.float() / max(float(moment.diagonal().sum()), 1e-30) * columns
    made = []
    for number in range(len(settings)):
        mine = slice(number * rows, (number + 1) * rows)
        error = off[mine].square().sum() if metric is None else ((off[mine] @ metric) * off[mine]).sum()
        scale, zero = grids[number]
        made.append(Rounded(codes[mine].to(torch.uint8), scale, zero.to(torch.uint8), float(error)))
    return made


def coded(values: Tensor, scales: Tensor, zeros: Tensor, top: Tensor) -> Tensor:
    """The nearest codes."""
    return torch.minimum((values / scales).round_().add_(zeros).clamp_(min=0), top)


def compensated(whole: Tensor, scales: Tensor, zeros: Tensor, top: Tensor, moment: Tensor, kept: Tensor | None) -> Tensor:
    """Codes of GPTQ's rounding, columns with the largest inputs first."""
    order = torch.argsort(moment.diagonal(), descending=True)
    factor = inverse_factor(moment[order][:, order])
    left, scales, zeros = whole[:, order], scales[:, order], zeros[:, order]
    kept = None if kept is None else kept[:, order]
    codes = torch.empty_like(left)
    for begin in range(0, left.shape[1], BLOCK):
        end = min(begin + BLOCK, left.shape[1])
        block, errors = left[:, begin:end].T.contiguous(), []     # a column lies together
        inner = factor[begin:end, begin:end]
        steps, points = scales[:, begin:end].T.contiguous(), zeros[:, begin:end].T.contiguous()
        for place in range(end - begin):
            value = block[place]
            code = coded(value, steps[place], points[place], top[:, 0])
            if kept is not None:
                code = torch.where(kept[:, begin + place], code, points[place])
            codes[:, begin + place] = code
            error = (value - (code - points[place]) * steps[place]) / inner[place, place]
            block[place + 1:] -= inner[place, place + 1:, None] * error
            errors.append(error)
        left[:, end:] -= torch.stack(errors, 1) @ factor[begin:end, end:]
    found = torch.empty_like(codes)
    found[:, order] = codes
    return found


def inverse_factor(moment: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse; with more damping where the moment has no inverse."""
    moment = moment.double()
    mean = float(moment.diagonal().mean()) or 1.0
    for damping in (DAMPING, 10 * DAMPING, 100 * DAMPING):
        damped = moment + damping * mean * torch.eye(len(moment), dtype=torch.float64)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            factor: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True).float()
            return factor
    return torch.eye(len(moment))   # to the nearest: not a number of it can be trusted


def grid(weight: Tensor, setting: Setting, importance: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scale (float16) and zero of every group of every row: the range of its numbers, shrunk by what makes the error least."""
    rows, columns = weight.shape
    groups, top = -(-columns // setting.group), 2 ** setting.bits - 1
    padded = torch.nn.functional.pad(weight, (0, groups * setting.group - columns)).view(rows, groups, setting.group)
    weights = None
    if importance is not None:
        weights = torch.nn.functional.pad(importance, (0, groups * setting.group - columns)).view(1, groups, setting.group)
    low, high = padded.amin(-1).clamp(max=0), padded.amax(-1).clamp(min=0)
    if float((high - low).max()) / top > LARGEST:
        raise ValueError(f"numbers up to {float((high - low).max()):.3g}, whose steps float16 does not have")
    best = (torch.full_like(low, torch.inf), torch.ones_like(low), torch.zeros_like(low))
    for shrink in SHRINKS if setting.bits < 8 else SHRINKS[:1]:
        scale = ((high - low) * (shrink / top)).clamp(min=LEAST_SCALE).half().float()
        zero = (-low * shrink / scale).round().clamp(0, top)
        off = (coded(padded, scale[..., None], zero[..., None], torch.tensor(float(top))) - zero[..., None]) * scale[..., None] - padded
        error = (off.square() if weights is None else off.square() * weights).sum(-1)
        better = error < best[0]
        best = tuple(torch.where(better, new, old) for new, old in zip((error, scale, zero), best, strict=True))  # type: ignore[assignment]
    return best[1].half(), best[2]


def spread(values: Tensor, group: int, columns: int) -> Tensor:
    """A number a group, as a number a column."""
    return values.repeat_interleave(group, 1)[:, :columns]
