"""Statistics of many devices made one: their mean, or their median where devices may lie."""

from __future__ import annotations

import torch
from torch import Tensor

from shoestring.federated.layout import Layout, StatisticKind


def mean_statistics(layout: Layout, rows: Tensor, counts: Tensor) -> Tensor:
    """The mean by samples (s) of rows (k, s). It lies between the least and the largest of every number, so no variance is negative."""
    found = (counts[:, None] * rows.double()).sum(0) / counts.sum()
    return with_whole_counters(layout, found.to(rows.dtype))


def median_statistics(layout: Layout, rows: Tensor, counts: Tensor) -> Tensor:
    """The median of devices that count alike, number by number: a few that lie can't move it far."""
    ordered = rows.sort(dim=0).values
    return with_whole_counters(layout, 0.5 * ordered[(len(rows) - 1) // 2] + 0.5 * ordered[len(rows) // 2])


def with_whole_counters(layout: Layout, row: Tensor) -> Tensor:
    return torch.where(layout.marks(StatisticKind.COUNTER), row.round(), row)


def wrong_statistics(layout: Layout, rows: Tensor | None, count: int) -> list[str]:
    """Why the statistics of each of `count` devices can't be used; empty if they can."""
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
