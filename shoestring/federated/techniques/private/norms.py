"""Norms of updates, and updates made no longer than a norm."""

from __future__ import annotations

import torch
from torch import Tensor

PART = 1024  # numbers that are added at once
BELOW = (
    1 - 2**-20
)  # a shortened update is so much shorter still: rounding 32-bit numbers must not leave it longer than it may be


def norms(rows: Tensor) -> Tensor:
    """(k) in 64 bits. Squares are added part by part, so a row's has the same bits among other rows, and with any number of threads."""
    return torch.stack([square_sum(row).sqrt() for row in rows]) if len(rows) else torch.zeros(0, dtype=torch.float64)


def square_sum(row: Tensor) -> Tensor:
    found = row.double().square()
    while len(found) > 1:
        found = torch.nn.functional.pad(found, (0, -len(found) % PART)).view(-1, PART).sum(1)
    return found.sum()


def clipped(rows: Tensor, norm: float) -> tuple[Tensor, Tensor]:
    """Rows whose norm is `norm` or less, and which of them (k) were so already; those keep their bits."""
    found = norms(rows)
    within = found <= norm
    if bool(within.all()):
        return rows, within
    shrink = torch.where(within, 1.0, norm * BELOW / found)[:, None]
    return torch.where(within[:, None], rows, (rows * shrink).to(rows.dtype)), within
