"""Krum and Multi-Krum: robust aggregation by the update that is nearest to its neighbours, or by the mean of the m
nearest.

    score(i)    =  sum of |x_i - x_j|^2 over the k - f - 2 other updates j that are nearest to x_i
    Krum        update  =  x_i with the lowest score (the first of equals)
    Multi-Krum  update  =  mean of the m with the lowest scores;   m = 1: Krum

    x_i: update of device i, of k devices, of which f are malicious

Krum's proof needs k >= 2 f + 3; Multi-Krum's is for m <= k - f - 2 (El Mhamdi, Guerraoui, Rouault 2018, The Hidden
Vulnerability of Distributed Learning in Byzantium, arXiv 1802.07927). All devices have the same weight, however many
samples they have. With fewer than 2 f + 3 devices, or than m, the round makes no update: see robust.py.
Blanchard, El Mhamdi, Guerraoui, Stainer 2017, Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent,
arXiv 1703.02757.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoestring.core.errors import Mistake
from shoestring.federated.round import Round
from shoestring.federated.technique import FederatedTechnique, RoundCost
from shoestring.federated.techniques.combine.robust import column_blocks, privacy_refusal, with_robust_rule


@dataclass(frozen=True)
class Krum(FederatedTechnique):
    """Take the one update that is nearest to the others.

    Costs: the work of all other devices of the round, and k^2 distances between k updates.

    Not for: devices whose records differ much: the one that is taken speaks for its own records only. `MultiKrum`
    loses less.
    """

    malicious: int  # most malicious devices in a round

    why: ClassVar[str] = "the one update that is nearest to its neighbours: resists malicious devices"
    seam: ClassVar[str] = "combine"
    slot: ClassVar[str] = "combine"
    order: ClassVar[int] = 50
    on_request: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_malicious("Krum", self.malicious)

    def refusal(self, cost: RoundCost) -> str:
        return privacy_refusal(cost) or self.too_few(cost.per_round)

    def too_few(self, count: int) -> str:
        return too_few(count, self.malicious)

    def cost(self, cost: RoundCost) -> RoundCost:
        return cost

    def apply(self, round: Round) -> Round:
        return with_robust_rule(
            round, "Krum", lambda rows: (rows[int(rank_rows(rows, self.malicious)[0])].clone(), 1), self.too_few
        )


@dataclass(frozen=True)
class MultiKrum(FederatedTechnique):
    """Take the mean of the updates that are nearest to each other.

    Costs: k^2 distances between k updates, and the work of the devices that are left out.

    Not for: rounds of fewer than 2 f + 3 devices for f malicious ones.
    """

    malicious: int  # most malicious devices in a round
    keep: int = 0  # updates to average; 0: as many as the proof allows, k - malicious - 2

    why: ClassVar[str] = "the mean of the updates that are nearest to their neighbours: resists malicious devices"
    seam: ClassVar[str] = "combine"
    slot: ClassVar[str] = "combine"
    order: ClassVar[int] = 50
    on_request: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_malicious("MultiKrum", self.malicious)
        if self.keep < 0:
            raise Mistake(
                f"MultiKrum(keep={self.keep}): it is a number of devices; give 1 or more, or 0 for as many as are safe"
            )

    def refusal(self, cost: RoundCost) -> str:
        return privacy_refusal(cost) or self.too_few(cost.per_round)

    def too_few(self, count: int) -> str:
        most = count - self.malicious - 2
        if reason := too_few(count, self.malicious):
            return reason
        return (
            ""
            if self.keep <= most
            else (
                f"keep={self.keep} of {count} devices with {self.malicious} malicious: more than {most} may "
                f"have a malicious one among them; give keep={most} or less, or more devices a round"
            )
        )

    def cost(self, cost: RoundCost) -> RoundCost:
        return cost

    def apply(self, round: Round) -> Round:
        def rule(rows: Tensor) -> tuple[Tensor, int]:
            kept = rank_rows(rows, self.malicious)[: self.keep or len(rows) - self.malicious - 2].sort().values
            return torch.cat(
                [block[kept].mean(dim=0, dtype=torch.float64).to(rows.dtype) for block in column_blocks(rows)]
            ), len(kept)

        return with_robust_rule(round, "MultiKrum", rule, self.too_few)


def check_malicious(name: str, malicious: int) -> None:
    if malicious < 0:
        raise Mistake(f"{name}(malicious={malicious}): it is a number of devices; give 0 or more")


def too_few(count: int, malicious: int) -> str:
    least = 2 * malicious + 3
    return (
        ""
        if count >= least
        else (
            f"{count} devices, {malicious} of them malicious: Krum needs {least} or more to tell them apart; "
            f"give {least} a round or more, or fewer malicious ones"
        )
    )


def rank_rows(rows: Tensor, malicious: int) -> Tensor:
    """Indices of the rows, lowest score first."""
    apart = distances(rows).fill_diagonal_(torch.inf)  # an update is not its own neighbour
    scores = apart.sort(dim=1).values[:, : len(rows) - malicious - 2].sum(dim=1)
    return scores.argsort(stable=True)


def distances(rows: Tensor) -> Tensor:
    """Squared distances (k, k) of all pairs. Computed from differences in 64 bits, so equal rows are at 0 and huge rows
    stay finite."""
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for block in column_blocks(rows):
        total += torch.cdist(block.double(), block.double(), compute_mode="donot_use_mm_for_euclid_dist").square()
    return total
