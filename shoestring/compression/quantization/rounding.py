"""Round weights to an integer grid with GPTQ, so that the layer's output changes least.

A row w of a weight is multiplied with activations x, whose second moment M = sum of x x^T is known from calibration.
Rounding it to q costs

    (w - q) M (w - q)^T

Columns are rounded one by one, those with the largest activations first, and columns not yet rounded compensate for the
error made so far. Let M = L L^T, with columns sorted by growing activation and rounded from the last to the first. Then
column j is rounded from

    w_j + sum over rounded k of (w_k - q_k) L_kj / L_jj

which minimises the cost if no other column had to be rounded. This is GPTQ (Frantar, Ashkboos, Hoefler, Alistarh 2023,
"GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", arXiv 2210.17323, after Hassibi,
Stork 1993, "Optimal Brain Surgeon") without inverting M: Chee et al. 2023, "QuIP", arXiv 2307.13304, theorem 6, shows
that the two are equivalent. If r_j is the rounding error of that sum, the total cost is the sum of (L_jj r_j)^2.

Rows are independent, so several grids (8, 4, 3 ... bits) are rounded in one pass, as additional rows. Measured on
MiniLM (22.7 M weights, 1 - cosine of sentence embeddings, all linear layers, groups of 64): 4 bits .010, against .034
for round-to-nearest; 3 bits .041 against .119.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoestring.compression.calibration.moments import Factor, SecondMoment, panel_bounds
from shoestring.numerics.block_quantization import in_blocks, per_number

BLOCK = 32  # columns whose compensation is accumulated before it is applied to the rest
SHRINKS = (1.0, 0.94, 0.88, 0.82, 0.75, 0.68)  # factors by which a group's range is shrunk when its grid is fitted
LEAST_SCALE = 6e-8  # smallest positive float16
LARGEST = 65504.0  # largest float16
NUMBERS = 1 << 21  # rounded at once, which bounds memory,
AT_ONCE = 4  # on this many grids; with fewer grids memory is the same, as fitting scales needs more for each

Grids = Callable[[Tensor], tuple[Tensor, Tensor]]  # columns -> scales and zero points, (columns, rows) each


class GridSetting(NamedTuple):
    bits: int
    group: int


class RoundedWeight(NamedTuple):
    """A weight (rows, columns) rounded to a grid: scale * (code - zero point)."""

    codes: Tensor  # (rows, columns), uint8
    scales: Tensor  # (rows, groups), float16
    zeros: Tensor  # zero points (rows, groups), uint8
    error: float  # (w - q) M (w - q)^T summed over rows; |w - q|^2 if M is unknown


def round_to_grid(
    weight: Tensor,
    settings: Sequence[GridSetting],
    moment: SecondMoment | Tensor | None = None,
    mask: Tensor | None = None,
) -> list[RoundedWeight]:
    """Round a weight (rows, columns) to each of several grids.

    `moment`: second moment of its inputs, (columns, columns); without it, round to nearest. `mask`: pruning mask;
    numbers where it is False stay zero.
    """
    known = SecondMoment.of(moment) if isinstance(moment, Tensor) else moment
    at_once = max(1, NUMBERS // max(weight.shape[1] * max(len(settings), AT_ONCE), 1))
    codes = torch.empty(len(settings), *weight.shape, dtype=torch.uint8)
    parts: list[list[RoundedWeight]] = []
    for first in range(0, len(weight), at_once):
        mine = slice(first, first + at_once)
        parts.append(round_rows(weight[mine], settings, known, None if mask is None else mask[mine]))
        for number, one in enumerate(parts[-1]):
            codes[number, mine] = one.codes
            parts[-1][number] = one._replace(codes=one.codes[:0])
    return [
        RoundedWeight(
            codes[number],
            torch.cat([one.scales for one in some]),
            torch.cat([one.zeros for one in some]),
            sum(one.error for one in some),
        )
        for number, some in enumerate(zip(*parts, strict=True))
    ]


def round_rows(
    weight: Tensor, settings: Sequence[GridSetting], moment: SecondMoment | None, mask: Tensor | None
) -> list[RoundedWeight]:
    weight = weight.detach().float()
    found = [
        fit_grid(weight, setting, None if moment is None else moment.diagonal().clamp(min=0)) for setting in settings
    ]
    factor = None if moment is None else moment.factor()
    if factor is not None:
        top = torch.cat([torch.full((len(weight),), float(2**setting.bits - 1)) for setting in settings])
        codes, errors = gptq(weight, stack_grids(found, settings), top, factor, mask)
        return [
            RoundedWeight(code, scale, zero.to(torch.uint8), error)
            for code, (scale, zero), error in zip(codes, found, errors, strict=True)
        ]
    made = []
    for (scale, zero), setting in zip(found, settings, strict=True):
        steps, points = (per_number(one.float(), setting.group, weight.shape[1]) for one in (scale, zero))
        codes = nearest_codes(weight, steps, points, torch.tensor(float(2**setting.bits - 1)))
        codes = codes if mask is None else torch.where(mask, codes, points)
        off = (codes - points) * steps - weight
        error = float(off.square().sum(dtype=torch.float64)) if moment is None else moment.error(off)
        made.append(RoundedWeight(codes.to(torch.uint8), scale, zero.to(torch.uint8), error))
    return made


def stack_grids(found: Sequence[tuple[Tensor, Tensor]], settings: Sequence[GridSetting]) -> Grids:
    """Scales and zero points of several grids for the same rows, concatenated as if they were more rows."""
    columns_first = [(scale.float().T.contiguous(), zero.T.contiguous()) for scale, zero in found]

    def of(columns: Tensor) -> tuple[Tensor, Tensor]:
        places = [columns // setting.group for setting in settings]
        scales, zeros = (
            torch.cat([pair[which][place] for pair, place in zip(columns_first, places, strict=True)], 1)
            for which in (0, 1)
        )
        return scales, zeros

    return of


def nearest_codes(values: Tensor, scales: Tensor, zeros: Tensor, top: Tensor) -> Tensor:
    """Round to nearest, clamped to 0..top."""
    return torch.minimum((values / scales).round_().add_(zeros).clamp_(min=0), top)


def gptq_one_grid(
    weight: Tensor, scales: Tensor, zeros: Tensor, top: Tensor, moment: Tensor, mask: Tensor | None
) -> Tensor:
    """GPTQ codes on one grid, whose scales and zero points are given for every number."""
    factor = SecondMoment.of(moment).factor()
    if factor is None:
        return nearest_codes(weight, scales, zeros, top)
    return gptq(weight, lambda columns: (scales.T[columns], zeros.T[columns]), top.view(-1), factor, mask)[0][0].float()


def gptq(
    weight: Tensor, grids: Grids, top: Tensor, factor: Factor, mask: Tensor | None = None
) -> tuple[Tensor, list[float]]:
    """GPTQ codes (grids, rows, columns), and the error on each grid. `top` (grids * rows): the largest code."""
    rows, columns = weight.shape
    times = len(top) // rows
    first = weight.T[factor.order]  # (columns, rows): each column is contiguous
    left = first.repeat(1, times)  # the compensated values to round; afterwards their rounding errors
    kept = None if mask is None else mask.T[factor.order].repeat(1, times)
    codes = torch.empty(columns, len(top), dtype=torch.uint8)
    costs = torch.zeros(len(top), dtype=torch.float64)
    for number, (begin, end) in reversed(list(enumerate(panel_bounds(columns)))):
        lower = factor.unit_panel(number)
        steps, points = grids(factor.order[begin:end])
        off, block = first[begin:end].repeat(1, times), left[begin:end]
        columns_of = [one.unbind(0) for one in (block, steps, points, off, codes[begin:end])]
        for stop in range(end - begin, 0, -BLOCK):
            start = max(stop - BLOCK, 0)
            inner = lower[start:stop, begin + start : begin + stop]
            for place in range(stop - 1, start - 1, -1):
                mine, step, point, error, kept_codes = (one[place] for one in columns_of)
                code = nearest_codes(mine, step, point, top)
                if kept is not None:
                    code = torch.where(kept[begin + place], code, point)
                kept_codes.copy_(code)
                value = code.sub_(point).mul_(step)
                mine.sub_(value)
                error.sub_(value)
                block[start:place].addr_(inner[place - start, : place - start], error)
            block[:start].addmm_(lower[start:stop, begin : begin + start].T, off[start:stop])
        left[:begin].addmm_(lower[:, :begin].T, off)
        costs += (block * factor.diagonal[begin:end, None]).square_().sum(0, dtype=torch.float64)
        costs -= factor.damping * off.square_().sum(0, dtype=torch.float64)
    found = torch.empty_like(codes)
    found[factor.order] = codes
    return found.T.reshape(times, rows, columns), costs.view(times, rows).sum(1).clamp(min=0).tolist()


def fit_grid(weight: Tensor, setting: GridSetting, importance: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scale (float16) and zero point of every group of every row: the range of its numbers, shrunk by the factor with
    the least error."""
    top = 2**setting.bits - 1
    padded = in_blocks(weight, setting.group, fill=0.0)  # (rows, groups, group)
    weights = None
    if importance is not None:
        weights = in_blocks(importance[None], setting.group, fill=0.0)
    low, high = padded.amin(-1).clamp(max=0), padded.amax(-1).clamp(min=0)
    if float((high - low).max()) / top > LARGEST:
        raise ValueError(f"numbers up to {float((high - low).max()):.3g}, whose steps float16 does not have")
    best = (torch.full_like(low, torch.inf), torch.ones_like(low), torch.zeros_like(low))
    for shrink in SHRINKS if setting.bits < 8 else SHRINKS[:1]:
        scale = ((high - low) * (shrink / top)).clamp(min=LEAST_SCALE).half().float()
        zero = (-low * shrink / scale).round().clamp(0, top)
        off = (
            nearest_codes(padded, scale[..., None], zero[..., None], torch.tensor(float(top))) - zero[..., None]
        ) * scale[..., None] - padded
        error = (off.square() if weights is None else off.square() * weights).sum(-1)
        better = error < best[0]
        best = tuple(torch.where(better, new, old) for new, old in zip((error, scale, zero), best, strict=True))  # type: ignore[assignment]
    return best[1].half(), best[2]
