"""A norm bound: no device's update is longer than it, so that one malicious device can do only so much.

    x_i  <-  x_i min(1, norm / |x_i|)

The server does this to what arrives, before whatever rule combines it; an update that is not longer keeps its bits. A norm
layer's statistics are no part of it; they could be forged as well, so the server takes their median.
Sun, Kairouz, Suresh, McMahan 2019, Can You Really Backdoor Federated Learning?, arXiv 1911.07963.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from shoestring.core.errors import Mistake
from shoestring.federated.combined_statistics import median_statistics
from shoestring.federated.round import Combined, Round, ServerState, Updates
from shoestring.federated.technique import FederatedTechnique, RoundCost


@dataclass(frozen=True)
class NormBound(FederatedTechnique):
    """Shorten every update that is longer than a bound.

    Costs: what long updates of honest devices would have added.

    Not for: attacks by many devices: it limits what each one does, not what all of them do together.
    """

    norm: float  # largest Euclidean norm of an update

    why: ClassVar[str] = "no update is longer than a bound: limits what a malicious device does"
    seam: ClassVar[str] = "combine"
    order: ClassVar[int] = 58  # after the rules: it wraps theirs, so it sees what arrives before them

    def __post_init__(self) -> None:
        if not 0.0 < self.norm < float("inf"):
            raise Mistake(
                f"NormBound(norm={self.norm}): it is the largest norm of an update; give a finite number above 0"
            )

    @classmethod
    def choices(cls, cost: RoundCost) -> tuple[NormBound, ...]:
        return ()

    def cost(self, cost: RoundCost) -> RoundCost:
        return cost

    def apply(self, round: Round) -> Round:
        def combine(server: ServerState, arriving: Iterable[Updates]) -> Combined:
            return round.combine(
                server, (replace(updates, rows=bounded(updates.rows, self.norm)) for updates in arriving)
            )

        return round.with_(combine=combine, settle=median_statistics)


def bounded(rows: Tensor, norm: float) -> Tensor:
    """In 64 bits, in which no square of a 32-bit number is too large."""
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.float64)
    over = norms[:, 0] > norm
    if not bool(over.any()):
        return rows
    shrunk = rows.clone()
    shrunk[over] = (rows[over].double() * (norm / norms[over])).to(rows.dtype)
    return shrunk
