"""Norms of client updates, and clipping."""

from __future__ import annotations

import torch
from torch import Tensor

PART = 1024  # numbers added at once
BELOW = (
    1 - 2**-20
)  # a clipped update is made shorter by this factor, so that rounding to 32 bits can't leave it longer than the norm


def norms(rows: Tensor) -> Tensor:
    """Norm of every row (k), in 64 bits. Squares are added in fixed parts, so a norm has the same bits with any other
    rows or threads."""
    return torch.stack([square_sum(row).sqrt() for row in rows]) if len(rows) else torch.zeros(0, dtype=torch.float64)


def square_sum(row: Tensor) -> Tensor:
    found = row.double().square()
    while len(found) > 1:
        found = torch.nn.functional.pad(found, (0, -len(found) % PART)).view(-1, PART).sum(1)
    return found.sum()


def clip_to_norm(rows: Tensor, norm: float) -> tuple[Tensor, Tensor]:
    """The rows clipped to a norm, and a mask (k) of the rows that were short enough already; those keep their bits."""
    found = norms(rows)
    within = found <= norm
    if bool(within.all()):
        return rows, within
    shrink = torch.where(within, 1.0, norm * BELOW / found)[:, None]
    return torch.where(within[:, None], rows, (rows * shrink).to(rows.dtype)), within
