"""FedAvgM: momentum on the server, which evens out differences between the cohorts of successive rounds.

    v  <-  momentum v + d
    w  <-  w + lr v            d: the combined update; v begins at 0

momentum=0, lr=1 is plain averaging, bit for bit. A round without any update leaves w and v unchanged.
Hsu, Qi, Brown 2019, Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification, arXiv
1909.06335.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness
from shoestring.federated.round import Round
from shoestring.federated.technique import FederatedTechnique, RoundCost
from shoestring.federated.techniques.advance.server_step import Moments, check_rates, with_server_optimizer


@dataclass(frozen=True)
class FedAvgM(FederatedTechnique):
    """Move the server's weights with momentum.

    Costs: one more row of numbers on the server, and a rate to choose.

    Not for: few rounds: momentum needs some to build up.
    """

    momentum: float = 0.9
    lr: float = 1.0

    why: ClassVar[str] = "momentum on the server"
    seam: ClassVar[str] = "advance"
    slot: ClassVar[str] = "advance"
    order: ClassVar[int] = 70
    on_request: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.momentum < 1.0:
            raise Mistake(f"FedAvgM(momentum={self.momentum}): give a number from 0 to less than 1")
        check_rates("FedAvgM", lr=self.lr)

    @property
    def is_plain(self) -> bool:
        return self.momentum == 0.0 and self.lr == 1.0

    def exactness(self, cost: RoundCost) -> Exactness:
        return Exactness.BITS if self.is_plain else Exactness.CHANGED

    def cost(self, cost: RoundCost) -> RoundCost:
        return cost

    def apply(self, round: Round) -> Round:
        def step(update: Tensor, before: Moments) -> tuple[Tensor, Moments]:
            velocity = self.momentum * before["v"] + update
            return self.lr * velocity, {"v": velocity}

        return (
            round
            if self.is_plain
            else with_server_optimizer(round, "FedAvgM", step, lambda weights: {"v": torch.zeros_like(weights)})
        )
