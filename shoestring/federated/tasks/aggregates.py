"""What comes back from devices: sums over them, and counts in declared bins. Both are added up, in any order, to the same but for rounding.

Of k columns (candidates, or one and its difference to another) with the sum s_j over the w samples of a device, each device sends

    1    w  w^2  w^3    s_j / w    s_i s_j / w^2    s_j    w s_j    s_i s_j          i <= j

and nothing else of them. The sums of these over devices are enough for means over devices and over samples, their standard errors, and
those of differences and ratios (`estimates`). They are 64-bit numbers: a spread below 1e-7 of the mean is lost in rounding.
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

HEAD = 4  # devices, w, w^2, w^3
BYTES = 8  # of a number
# Bins of a metric that declares none: shares in steps of 0.05, then losses, ever wider
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
    """How many devices have a value in which bin: below the first edge, from each to the next, and from the last on."""

    edges: tuple[float, ...]  # declared before anything is seen, rising
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
            raise Mistake("two histograms of other edges can't be added up: all devices must be given the same ones")
        return Histogram(self.edges, tuple(a + b for a, b in zip(self.counts, other.counts, strict=True)))


def counted(value: float, edges: tuple[float, ...]) -> Histogram:
    """One device's value.

    >>> counted(0.5, (0.0, 0.5, 1.0)).counts
    (0, 0, 1, 0)
    """
    bin = bisect_right(edges, value)
    return Histogram(edges, tuple(int(bin == place) for place in range(len(edges) + 1)))


@dataclass(frozen=True)
class ColumnMoments:
    """The sums of k columns over devices, as the top of this file has them."""

    columns: int
    sums: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.sums) != length(self.columns):
            raise Mistake(f"{len(self.sums)} sums of {self.columns} columns: there are {length(self.columns)}")

    @property
    def devices(self) -> int:
        return int(self.sums[0])

    def plus(self, other: ColumnMoments) -> ColumnMoments:
        return ColumnMoments(self.columns, tuple(a + b for a, b in zip(self.sums, other.sums, strict=True)))


def length(columns: int) -> int:
    """Numbers that a device sends for so many columns.

    >>> length(1), length(2)
    (9, 16)
    """
    return HEAD + 3 * columns + columns * (columns + 1)


@lru_cache(maxsize=256)
def upper(columns: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows and columns of a symmetric matrix' upper half."""
    rows, places = np.triu_indices(columns)
    return rows.astype(np.int64), places.astype(np.int64)


def sums_of(weights: Floats, totals: Floats) -> Floats:
    """What devices send: of weights (...) and totals (..., k), the numbers (..., length)."""
    i, j = upper(totals.shape[-1])
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


def moments(weight: float, totals: Sequence[float]) -> ColumnMoments:
    """Of one device."""
    found = sums_of(np.asarray(weight, np.float64), np.asarray(totals, np.float64))
    return ColumnMoments(len(totals), tuple(found.tolist()))
