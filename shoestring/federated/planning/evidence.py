"""Client updates measured in the first round, from which the planner estimates the error that compression and noise
make.

    y_i = u_i n_i / mean n          u_i: update of client i with n_i samples; the round's update is about the mean of k of the y_i
    E|mean of k|^2  =  |mu|^2 + V / k          mu, V: mean and total variance of the y_i, estimated from the measured ones

Where clients agree, V is small, and errors average out or add up as the updates do. Where they disagree (one class
each), updates cancel in the mean, and the same error per client is a larger share of what remains.
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
CACHE_CLEARERS: list[Callable[[], None]] = []  # each empties the cache of one function


def cache_by_identity(function: F) -> F:
    """Cache a function by the identity of its tensors: the planner asks for the same ones in every combination of
    techniques."""
    cached = lru_cache(maxsize=16)(function)
    CACHE_CLEARERS.append(cached.cache_clear)
    return cast(F, cached)


def clear_caches() -> None:
    """Empty all caches of this module, once the plan is chosen."""
    for clear in CACHE_CLEARERS:
        clear()


@dataclass(frozen=True, eq=False)
class UpdateEvidence:
    exact: Tensor  # (m, size): updates of m clients before any codec
    seconds: float  # work of one client on this machine, with as many at once as in the run
    counts: Tensor  # (m) samples of each client
    decoded: Tensor  # (m, size): the updates that the server decodes, without random errors whose mean is 0
    values: Tensor  # (m, values): the numbers sent in their place, which another codec may compress further

    @classmethod
    def of(cls, rows: Tensor, seconds: float = 0.0, counts: Tensor | None = None) -> UpdateEvidence:
        """Evidence from updates (m, size) to which no codec was applied yet."""
        return cls(
            rows, seconds, torch.ones(len(rows), dtype=torch.float64) if counts is None else counts.double(), rows, rows
        )

    @cached_property
    def weights(self) -> Tensor:
        """(m): every client's weight in the mean, 1 on average."""
        return self.counts / self.counts.mean()

    def square(self, per_round: int) -> float:
        """E|update of a round|^2."""
        return mean_square(self.exact, self.weights, per_round)

    def remaining_square(self, per_round: int) -> float:
        """E|update of a round|^2 after what devices do before they send, scaled by the median norm of a client update."""
        before = median_norm(self.exact)
        return self.square(per_round) * ((median_norm(self.values) / before) ** 2 if before else 1.0)

    def bias(self, per_round: int) -> float:
        """E|mean of decoded updates - mean of exact updates|^2."""
        return (
            0.0
            if self.decoded is self.exact
            else mean_square(residual(self.exact, self.decoded), self.weights, per_round)
        )

    def variance(self, squares: Tensor, per_round: int) -> float:
        """E|error of the mean|^2 for independent errors with mean 0; `squares` (m): E|error|^2 of each client."""
        return float((self.weights.square() * squares).mean()) / max(per_round, 1)

    def select(self, places: Tensor) -> UpdateEvidence:
        """The same evidence for some columns only."""
        return replace(
            self, exact=self.exact[:, places], decoded=self.decoded[:, places], values=self.values[:, places]
        )


@cache_by_identity
def median_norm(rows: Tensor) -> float:
    """Median norm of the rows, rounded to four digits. Clip uses the same rounded number; with another one, rounding
    would make noise look a little smaller or larger and could decide which plan is chosen."""
    return float(f"{float(norms(rows).median()):.4g}")


@cache_by_identity
def residual(exact: Tensor, decoded: Tensor) -> Tensor:
    return exact - decoded


@cache_by_identity
def mean_square(rows: Tensor, weights: Tensor, per_round: int) -> float:
    """E|mean of `per_round` rows|^2, estimated from these rows."""
    count, scaled = len(rows), rows.double() * weights[:, None]
    each, mean = float(scaled.square().sum()) / count, float(scaled.mean(0).square().sum())
    spread = max(each - mean, 0.0) * count / (count - 1) if count > 1 else 0.0
    return max(mean - spread / count, 0.0) + spread / max(per_round, 1)
