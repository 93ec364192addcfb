"""The median and the trimmed mean: every number of the update is one that most devices agree with, whatever a few others send.

    median          update_j  =  median_i  x_ij                       of an even number of devices the mean of the two in the middle
    trimmed mean    update_j  =  mean of x_ij without the b largest and the b smallest of them,        b = ceil(share k)

    x_ij: number j of the update of device i, of k devices

Devices count alike, however many samples they have: with weights, a malicious device could say that it has a million. b is rounded up, so
that never less is cut than was asked for. Both resist while fewer than half (median), or than `share` (trimmed mean), are malicious.
With too few devices the round makes no update: see gathered.py.
Yin, Chen, Ramchandran, Bartlett 2018, Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, arXiv 1803.01498.
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
from shoestring.federated.techniques.combine.gathered import blocks, not_private, robust


@dataclass(frozen=True)
class CoordinateMedian(FederatedTechnique):
    """Take the median of the devices, number by number.

    Costs: all updates of a round in memory; honest but unusual devices hardly count.

    Not for: federations without malicious devices whose records differ much: what few devices know is lost.
    """

    why: ClassVar[str] = "the median of devices, number by number: resists malicious ones"
    seam: ClassVar[str] = "combine"
    slot: ClassVar[str] = "combine"
    order: ClassVar[int] = 50

    @classmethod
    def choices(cls, cost: RoundCost) -> tuple[CoordinateMedian, ...]:
        return ()

    def refusal(self, cost: RoundCost) -> str:
        return not_private(cost)

    def cost(self, cost: RoundCost) -> RoundCost:
        return cost

    def apply(self, round: Round) -> Round:
        return robust(round, "CoordinateMedian", lambda rows: (median(rows), len(rows)), lambda count: "")


@dataclass(frozen=True)
class TrimmedMean(FederatedTechnique):
    """Take the mean without the extremes, number by number.

    Costs: all updates of a round in memory; the extremes of honest devices are lost too.

    Not for: rounds in which more than `share` of the devices may be malicious.
    """

    share: float = 0.1  # of the devices, that is left out at each end

    why: ClassVar[str] = "the mean without the extremes, number by number: resists malicious devices"
    seam: ClassVar[str] = "combine"
    slot: ClassVar[str] = "combine"
    order: ClassVar[int] = 50

    def __post_init__(self) -> None:
        if not 0.0 <= self.share < 0.5:
            raise Mistake(
                f"TrimmedMean(share={self.share}): that share is cut off at both ends and something must be left; give a number "
                f"from 0 to less than 0.5"
            )

    @classmethod
    def choices(cls, cost: RoundCost) -> tuple[TrimmedMean, ...]:
        return ()

    def refusal(self, cost: RoundCost) -> str:
        return not_private(cost) or self.too_few(cost.per_round)

    def too_few(self, count: int) -> str:
        cut = trimmed(count, self.share)
        if count > 2 * cut:
            return ""
        return (
            f"{cut} of {count} devices are cut off at each end, which leaves none: give more devices a round, or less than "
            f"share={self.share}"
        )

    def cost(self, cost: RoundCost) -> RoundCost:
        return cost

    def apply(self, round: Round) -> Round:
        def rule(rows: Tensor) -> tuple[Tensor, int]:
            cut = trimmed(len(rows), self.share)
            return trimmed_mean(rows, cut), len(rows) - 2 * cut

        return robust(round, "TrimmedMean", rule, self.too_few)


def trimmed(count: int, share: float) -> int:
    """Devices that are cut off at each end.

    >>> [trimmed(count, 0.1) for count in (1, 7, 10, 11, 30)]
    [1, 1, 1, 2, 3]
    """
    return ceil(round(share * count, 9))  # 0.1 x 30 is 3, and a little more in floating point


def median(rows: Tensor) -> Tensor:
    low, high = (len(rows) - 1) // 2, len(rows) // 2

    def middle(block: Tensor) -> Tensor:
        ordered = block.sort(dim=0).values
        return 0.5 * ordered[low] + 0.5 * ordered[high] if low != high else ordered[low]

    return torch.cat([middle(block) for block in blocks(rows)])


def trimmed_mean(rows: Tensor, cut: int) -> Tensor:
    """Summed from small to large in 64 bits, so the order in which devices come changes nothing."""
    return torch.cat(
        [
            block.sort(dim=0).values[cut : len(rows) - cut].mean(dim=0, dtype=torch.float64).to(rows.dtype)
            for block in blocks(rows)
        ]
    )
