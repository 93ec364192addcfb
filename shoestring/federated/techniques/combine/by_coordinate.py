"""Coordinate-wise median and trimmed mean: robust aggregation that a few malicious devices can't control.

    median          update_j  =  median_i  x_ij                       for an even number of devices the mean of the middle two
    trimmed mean    update_j  =  mean of x_ij without the b largest and the b smallest,        b = ceil(share k)

    x_ij: number j of the update of device i, of k devices

All devices have the same weight: otherwise a malicious device could claim a million samples. b is rounded up, so that
no less is trimmed than was asked for. The median resists while fewer than half of the devices are malicious, the
trimmed mean while fewer than `share` are.
With too few devices the round makes no update: see robust.py.
Yin, Chen, Ramchandran, Bartlett 2018, Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, arXiv
1803.01498.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import ClassVar

import torch
from torch import Tensor

from shoestring.core.errors import Mistake
from shoestring.federated.round import Round
from shoestring.federated.technique import FederatedTechnique, RoundCost
from shoestring.federated.techniques.combine.robust import column_blocks, privacy_refusal, with_robust_rule


@dataclass(frozen=True)
class CoordinateMedian(FederatedTechnique):
    """Take the median of the devices, number by number.

    Costs: all updates of a round in memory; honest but unusual devices hardly count.

    Not for: federations without malicious devices whose records differ much: what few devices know is lost.
    """

    why: ClassVar[str] = "coordinate-wise median: resists malicious devices"
    seam: ClassVar[str] = "combine"
    slot: ClassVar[str] = "combine"
    order: ClassVar[int] = 50
    on_request: ClassVar[bool] = True

    def refusal(self, cost: RoundCost) -> str:
        return privacy_refusal(cost)

    def cost(self, cost: RoundCost) -> RoundCost:
        return cost

    def apply(self, round: Round) -> Round:
        return with_robust_rule(round, "CoordinateMedian", lambda rows: (median(rows), len(rows)), lambda count: "")


@dataclass(frozen=True)
class TrimmedMean(FederatedTechnique):
    """Take the mean without the extremes, number by number.

    Costs: all updates of a round in memory; the extremes of honest devices are lost too.

    Not for: rounds in which more than `share` of the devices may be malicious.
    """

    share: float = 0.1  # of the devices, trimmed at each end

    why: ClassVar[str] = "coordinate-wise mean without the extremes: resists malicious devices"
    seam: ClassVar[str] = "combine"
    slot: ClassVar[str] = "combine"
    order: ClassVar[int] = 50
    on_request: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.share < 0.5:
            raise Mistake(
                f"TrimmedMean(share={self.share}): this share is trimmed at both ends and something must remain; give a number "
                f"from 0 to less than 0.5"
            )

    def refusal(self, cost: RoundCost) -> str:
        return privacy_refusal(cost) or self.too_few(cost.per_round)

    def too_few(self, count: int) -> str:
        cut = trim_count(count, self.share)
        if count > 2 * cut:
            return ""
        return (
            f"{cut} of {count} devices are trimmed at each end, which leaves none: give more devices per round, or less than "
            f"share={self.share}"
        )

    def cost(self, cost: RoundCost) -> RoundCost:
        return cost

    def apply(self, round: Round) -> Round:
        def rule(rows: Tensor) -> tuple[Tensor, int]:
            cut = trim_count(len(rows), self.share)
            return trimmed_mean(rows, cut), len(rows) - 2 * cut

        return with_robust_rule(round, "TrimmedMean", rule, self.too_few)


def trim_count(count: int, share: float) -> int:
    """How many devices are trimmed at each end.

    >>> [trim_count(count, 0.1) for count in (1, 7, 10, 11, 30)]
    [1, 1, 1, 2, 3]
    """
    return ceil(round(share * count, 9))  # in floating point, 0.1 x 30 is a little more than 3


def median(rows: Tensor) -> Tensor:
    low, high = (len(rows) - 1) // 2, len(rows) // 2

    def middle(block: Tensor) -> Tensor:
        ordered = block.sort(dim=0).values
        return 0.5 * ordered[low] + 0.5 * ordered[high] if low != high else ordered[low]

    return torch.cat([middle(block) for block in column_blocks(rows)])


def trimmed_mean(rows: Tensor, cut: int) -> Tensor:
    """Mean without `cut` rows at each end. Sorted values are summed in 64 bits, so the order of the devices does not
    matter."""
    return torch.cat(
        [
            block.sort(dim=0).values[cut : len(rows) - cut].mean(dim=0, dtype=torch.float64).to(rows.dtype)
            for block in column_blocks(rows)
        ]
    )
