"""How long a batch takes, as a sum of what it has: fitted to measured batches, then asked for batches that nobody measured.

    seconds  =  batch  +  row * rows  +  token * positions  +  pair * sum of length^2

Positions are those that are computed, padding included; pairs are what attention adds. No coefficient is negative: a batch
never gets faster by having more in it (least squares with that bound, Lawson, Hanson 1974, Solving Least Squares Problems).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

TERMS = 4


@dataclass(frozen=True)
class MeasuredBatch:
    """A batch that was timed."""

    lengths: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class ServiceTime:
    """Seconds of one replica for a batch."""

    batch: float
    row: float
    token: float
    pair: float
    packed: bool  # else every row is padded to the longest

    def seconds(self, lengths: Sequence[int]) -> float:
        """
        >>> ServiceTime(0.5, 0.0, 0.01, 0.0, packed=True).seconds([10, 40])
        1.0
        >>> ServiceTime(0.5, 0.0, 0.01, 0.0, packed=False).seconds([10, 40])
        1.3
        """
        terms = terms_of(lengths, self.packed)
        return float(sum(one * count for one, count in zip(self.coefficients, terms, strict=True)))

    @property
    def coefficients(self) -> tuple[float, ...]:
        return self.batch, self.row, self.token, self.pair

    def slower(self, factor: float) -> ServiceTime:
        """The same with every second this many times as long, because other processes compute, too."""
        return replace(self, **{name: factor * getattr(self, name) for name in ("batch", "row", "token", "pair")})


def terms_of(lengths: Sequence[int], packed: bool) -> tuple[int, int, int, int]:
    """What the coefficients are multiplied with."""
    if packed:
        return 1, len(lengths), sum(lengths), sum(length * length for length in lengths)
    longest = max(lengths)
    return 1, len(lengths), len(lengths) * longest, len(lengths) * longest * longest


def fit_service_time(measured: Sequence[MeasuredBatch], packed: bool) -> ServiceTime:
    """The coefficients that are closest to what was measured, relative to it: a small batch counts as much as a large one.

    All subsets of the four terms are solved, and the best without a negative coefficient is taken.
    """
    rows = np.array([terms_of(one.lengths, packed) for one in measured], dtype=float)
    seconds = np.array([one.seconds for one in measured])
    weighted = rows / seconds[:, None]
    best, least = np.zeros(TERMS), np.inf
    for count in range(1, TERMS + 1):
        for chosen in combinations(range(TERMS), count):
            solved = np.linalg.lstsq(weighted[:, chosen], np.ones(len(seconds)), rcond=None)[0]
            error = float(((weighted[:, chosen] @ solved - 1) ** 2).sum())
            if (solved >= 0).all() and error < least:
                best, least = np.zeros(TERMS), error
                best[list(chosen)] = solved
    batch, row, token, pair = map(float, best)
    return ServiceTime(batch, row, token, pair, packed)


def relative_error(time: ServiceTime, measured: Sequence[MeasuredBatch]) -> float:
    """How far the fit is off, as a median."""
    return float(np.median([abs(time.seconds(one.lengths) / one.seconds - 1) for one in measured]))
