"""NormBound: the server bounds the norm of every client update, which limits what one malicious device can do.

    x_i  <-  x_i min(1, norm / |x_i|)

It runs before the aggregation rule. Shorter updates keep their bits. The bound does not cover norm-layer statistics,
which could be forged as well, so the server takes their median.
Sun, Kairouz, Suresh, McMahan 2019, Can You Really Backdoor Federated Learning?, arXiv 1911.07963.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from shoestring.core.errors import Mistake
from shoestring.federated.model.combined_statistics import median_statistics
from shoestring.federated.round import Combined, Round, ServerState, Updates
from shoestring.federated.technique import FederatedTechnique, RoundCost


@dataclass(frozen=True)
class NormBound(FederatedTechnique):
    """Shorten every update that is longer than a bound.

    Costs: what long updates of honest devices would have added.

    Not for: attacks by many devices: it limits what each one does, not what all of them do together.
    """

    norm: float  # largest Euclidean norm of an update

    why: ClassVar[str] = "bounds the norm of every update: limits what a malicious device can do"
    seam: ClassVar[str] = "combine"
    order: ClassVar[int] = 58  # after the aggregation rules: it wraps them, so it sees updates before they do
    on_request: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0.0 < self.norm < float("inf"):
            raise Mistake(
                f"NormBound(norm={self.norm}): it is the largest norm of an update; give a finite number above 0"
            )

    def cost(self, cost: RoundCost) -> RoundCost:
        return cost

    def apply(self, round: Round) -> Round:
        def combine(server: ServerState, arriving: Iterable[Updates]) -> Combined:
            return round.combine(
                server, (replace(updates, rows=bound_norms(updates.rows, self.norm)) for updates in arriving)
            )

        return round.with_(combine=combine, settle=median_statistics)


def bound_norms(rows: Tensor, norm: float) -> Tensor:
    """Scale long rows down to a norm. Norms are computed in 64 bits, where the square of a 32-bit number can't
    overflow."""
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.float64)
    over = norms[:, 0] > norm
    if not bool(over.any()):
        return rows
    shrunk = rows.clone()
    shrunk[over] = (rows[over].double() * (norm / norms[over])).to(rows.dtype)
    return shrunk
