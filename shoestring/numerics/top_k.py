"""The k largest numbers of a row by magnitude: as positions, or as a mask that is the same on every machine."""

from __future__ import annotations

import torch
from torch import Tensor


def top_k_places(numbers: Tensor, count: int) -> Tensor:
    """Positions of the `count` largest magnitudes of (n), ascending. NaN counts as the largest; torch decides between
    equal ones.

    >>> top_k_places(torch.tensor([1.0, -3.0, 2.0]), 2).tolist()
    [1, 2]
    """
    return numbers.abs().topk(count, sorted=False).indices.sort().values


def top_k_mask(row: Tensor, count: int) -> Tensor:
    """Mask of the `count` largest magnitudes; ties go to the first. If the row is not finite, the first `count`
    numbers.

    >>> top_k_mask(torch.tensor([1.0, -3.0, 1.0]), 2).tolist()
    [True, True, False]
    """
    if not bool(row.isfinite().all()):
        return torch.arange(len(row)) < count
    sizes = row.abs()
    least = sizes.topk(count).values[-1]
    kept = sizes > least
    kept[(sizes == least).nonzero().flatten()[: count - int(kept.sum())]] = True
    return kept
