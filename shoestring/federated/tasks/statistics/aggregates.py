"""What devices send: sums, and counts in bins that were declared before. They add up in any order, except for rounding.

For k columns (candidates, or one candidate and its difference to another), with the sum s_j over the w samples of a
device, it sends

    1    w  w^2  w^3    s_j / w    s_i s_j / w^2    s_j    w s_j    s_i s_j          i <= j

and nothing else. The sums of these numbers over devices suffice for means over devices and over samples, and for the
standard errors of means, differences and ratios (`estimates`). They are 64-bit numbers, so a spread below 1e-7 of the
mean is lost in rounding.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shoestring.core.errors import Mistake

Floats = NDArray[np.float64]

HEAD = 4  # numbers before the columns: devices, w, w^2, w^3
BYTES = 8  # per number
# Default bins of a metric: steps of 0.05 up to 1 for shares, then ever wider ones for losses
EDGES = (
    *(round(0.05 * number, 2) for number in range(21)),
    1.25,
    1.5,
    2.0,
    2.5,
    3.0,
    4.0,
    5.0,
    7.0,
    10.0,
    20.0,
    50.0,
    100.0,
)


@dataclass(frozen=True)
class Histogram:
    """Number of devices per bin: below the first edge, between two edges, and from the last edge on."""

    edges: tuple[float, ...]  # rising, and declared before any value is seen
    counts: tuple[int, ...]  # one more than edges

    def __post_init__(self) -> None:
        if not self.edges or any(not low < high for low, high in zip(self.edges, self.edges[1:], strict=False)):
            raise Mistake(f"a histogram with the edges {self.edges}: give rising numbers, one or more")
        if len(self.counts) != len(self.edges) + 1:
            raise Mistake(
                f"a histogram with {len(self.counts)} counts for {len(self.edges)} edges: there is one bin more than edges"
            )

    @property
    def devices(self) -> int:
        return sum(self.counts)

    def plus(self, other: Histogram) -> Histogram:
        if other.edges != self.edges:
            raise Mistake(
                "two histograms with different edges can't be added up: all devices must be given the same edges"
            )
        return Histogram(self.edges, tuple(a + b for a, b in zip(self.counts, other.counts, strict=True)))


def one_value_histogram(value: float, edges: tuple[float, ...]) -> Histogram:
    """The histogram of a single device's value.

    >>> one_value_histogram(0.5, (0.0, 0.5, 1.0)).counts
    (0, 0, 1, 0)
    """
    bin = bisect_right(edges, value)
    return Histogram(edges, tuple(int(bin == place) for place in range(len(edges) + 1)))


@dataclass(frozen=True)
class ColumnMoments:
    """Sums of k columns over devices, as listed at the top of this file."""

    columns: int
    sums: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.sums) != sums_length(self.columns):
            raise Mistake(f"{len(self.sums)} sums of {self.columns} columns: there are {sums_length(self.columns)}")

    @property
    def devices(self) -> int:
        return int(self.sums[0])

    def plus(self, other: ColumnMoments) -> ColumnMoments:
        return ColumnMoments(self.columns, tuple(a + b for a, b in zip(self.sums, other.sums, strict=True)))


def sums_length(columns: int) -> int:
    """How many numbers a device sends for so many columns.

    >>> sums_length(1), sums_length(2)
    (9, 16)
    """
    return HEAD + 3 * columns + columns * (columns + 1)


@lru_cache(maxsize=256)
def upper_indices(columns: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row and column indices of the upper half of a symmetric matrix."""
    rows, places = np.triu_indices(columns)
    return rows.astype(np.int64), places.astype(np.int64)


def sums_of(weights: Floats, totals: Floats) -> Floats:
    """The numbers (..., length) that devices send, from weights (...) and totals (..., k)."""
    i, j = upper_indices(totals.shape[-1])
    w = weights[..., None]
    values = totals / w
    return np.concatenate(
        [
            np.ones_like(w),
            w,
            w**2,
            w**3,
            values,
            values[..., i] * values[..., j],
            totals,
            w * totals,
            totals[..., i] * totals[..., j],
        ],
        axis=-1,
    )


def device_moments(weight: float, totals: Sequence[float]) -> ColumnMoments:
    """The sums of a single device."""
    found = sums_of(np.asarray(weight, np.float64), np.asarray(totals, np.float64))
    return ColumnMoments(len(totals), tuple(found.tolist()))
