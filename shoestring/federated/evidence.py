"""What a few devices of the first round really found, and how far from it a round ends whose updates are coded.

    y_i = u_i n_i / mean n          u_i: update of device i, of n_i samples; the round's update is about the mean of k of the y_i
    E|mean of k|^2  =  |mu|^2 + V / k          mu, V: mean and total variance of the y_i, estimated from those at hand

Devices that agree have a small V: their errors add up or average out as their updates do. Devices that do not (one class each) cancel each
other in the mean, so that the same error of every device is a larger share of what is left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from shoestring.federated.techniques.private.norms import norms

F = TypeVar("F", bound=Callable[..., Any])
REMEMBERED: list[Callable[[], None]] = []  # how to forget what was computed of tensors


def remembered(function: F) -> F:
    """Computed once for the same tensors, which are compared by identity: the chooser asks for the same ones in every combination."""
    cached = lru_cache(maxsize=16)(function)
    REMEMBERED.append(cached.cache_clear)
    return cast(F, cached)


def forget() -> None:
    """Free what was remembered; whoever has chosen needs it no more."""
    for clear in REMEMBERED:
        clear()


@dataclass(frozen=True, eq=False)
class UpdateEvidence:
    exact: Tensor  # (m, size): what m devices found
    seconds: float  # that one of them took, here, as many at once as will be
    counts: Tensor  # (m) samples of each
    decoded: Tensor  # (m, size): what the server has of it, but for errors that are random and 0 on average
    values: Tensor  # (m, values): the numbers that stand for it on the way up, which a further codec may code

    @classmethod
    def of(cls, rows: Tensor, seconds: float = 0.0, counts: Tensor | None = None) -> UpdateEvidence:
        """Of updates (m, size) that nothing has coded."""
        return cls(
            rows, seconds, torch.ones(len(rows), dtype=torch.float64) if counts is None else counts.double(), rows, rows
        )

    @cached_property
    def weights(self) -> Tensor:
        """(m) of every device in the mean, 1 on average."""
        return self.counts / self.counts.mean()

    def square(self, per_round: int) -> float:
        """E|update of a round|^2."""
        return mean_square(self.exact, self.weights, per_round)

    def left(self, per_round: int) -> float:
        """E|update of a round|^2, as far as a usual device's is left by what it does before it sends."""
        before = usual_norm(self.exact)
        return self.square(per_round) * ((usual_norm(self.values) / before) ** 2 if before else 1.0)

    def bias(self, per_round: int) -> float:
        """E|mean of what is decoded - mean of what was found|^2."""
        return (
            0.0
            if self.decoded is self.exact
            else mean_square(residual(self.exact, self.decoded), self.weights, per_round)
        )

    def variance(self, squares: Tensor, per_round: int) -> float:
        """E|error of the mean|^2 of errors that are random, 0 on average and each device's own; `squares` (m): E|error|^2 of each."""
        return float((self.weights.square() * squares).mean()) / max(per_round, 1)

    def some(self, places: Tensor) -> UpdateEvidence:
        """Of a part of every row."""
        return replace(
            self, exact=self.exact[:, places], decoded=self.decoded[:, places], values=self.values[:, places]
        )


@remembered
def usual_norm(rows: Tensor) -> float:
    """The median of |row|, to four digits, as Clip has it: measured by another one, noise that is large would look like less or more by
    the luck of rounding, which then chooses."""
    return float(f"{float(norms(rows).median()):.4g}")


@remembered
def residual(exact: Tensor, decoded: Tensor) -> Tensor:
    return exact - decoded


@remembered
def mean_square(rows: Tensor, weights: Tensor, per_round: int) -> float:
    """E|mean of `per_round` rows|^2, of rows like these."""
    count, scaled = len(rows), rows.double() * weights[:, None]
    each, mean = float(scaled.square().sum()) / count, float(scaled.mean(0).square().sum())
    spread = max(each - mean, 0.0) * count / (count - 1) if count > 1 else 0.0
    return max(mean - spread / count, 0.0) + spread / max(per_round, 1)
