"""Combines the norm-layer statistics of many devices: by their mean, or by their median where devices may lie."""

from __future__ import annotations

import torch
from torch import Tensor

from shoestring.federated.model.layout import Layout, StatisticKind


def mean_statistics(layout: Layout, rows: Tensor, counts: Tensor) -> Tensor:
    """Mean over devices (s), weighted by samples, of rows (k, s). A mean of non-negative variances is not negative
    either."""
    found = (counts[:, None] * rows.double()).sum(0) / counts.sum()
    return round_counters(layout, found.to(rows.dtype))


def median_statistics(layout: Layout, rows: Tensor, counts: Tensor) -> Tensor:
    """Unweighted median over devices, number by number: a few malicious devices can't move it far."""
    ordered = rows.sort(dim=0).values
    return round_counters(layout, 0.5 * ordered[(len(rows) - 1) // 2] + 0.5 * ordered[len(rows) // 2])


def round_counters(layout: Layout, row: Tensor) -> Tensor:
    """Round the counters (num_batches_tracked) to whole numbers."""
    return torch.where(layout.marks(StatisticKind.COUNTER), row.round(), row)


def statistics_problems(layout: Layout, rows: Tensor | None, count: int) -> list[str]:
    """For each of `count` devices, why its statistics are rejected; empty if they are accepted."""
    if rows is None or rows.shape != (count, layout.size):
        found = "no statistics" if rows is None else f"statistics of the shape {tuple(rows.shape[1:])}"
        return [f"it sent {found}, not of {(layout.size,)}" if layout.size or rows is not None else ""] * count
    negative = (rows[:, layout.marks(StatisticKind.VARIANCE)] < 0).any(1)
    return [
        "its statistics have numbers that are not finite"
        if not good
        else "its statistics have a negative variance"
        if bad
        else ""
        for good, bad in zip(rows.isfinite().all(1).tolist(), negative.tolist(), strict=True)
    ]
