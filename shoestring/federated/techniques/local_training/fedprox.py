"""FedProx: a proximal term keeps devices near the round's weights, so few or unusual records pull the model less far
away.

    device i minimises   F_i(w)  +  mu/2 |w - w_t|^2          gradient of a step:   grad F_i(w)  +  mu (w - w_t)

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith 2020, Federated Optimization in Heterogeneous Networks, arXiv 1812.06127.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar

from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness
from shoestring.federated.round import DeviceView, Objective, Order, Round, Updates
from shoestring.federated.technique import FederatedTechnique, RoundCost


@dataclass(frozen=True)
class FedProx(FederatedTechnique):
    """Pull every device's weights towards the common ones while it trains.

    Costs: one more term in every local step; devices learn less from their own records.

    Not for: devices whose records are alike: there the pull only slows them down.
    """

    mu: float = 0.01  # strength of the proximal term

    why: ClassVar[str] = "devices stay near the shared weights"
    seam: ClassVar[str] = "work"
    slot: ClassVar[str] = "work"
    order: ClassVar[int] = 10
    on_request: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.mu < inf:
            raise Mistake(f"mu={self.mu} in FedProx: it pulls devices towards the round's weights; give 0 or more")

    def cost(self, cost: RoundCost, /) -> RoundCost:
        return cost

    def exactness(self, cost: RoundCost, /) -> Exactness:
        return Exactness.CHANGED if self.mu else Exactness.BITS

    def apply(self, subject: Round, /) -> Round:
        def work(order: Order, devices: Sequence[DeviceView], objective: Objective) -> Updates:
            if self.mu and objective.start is None:
                objective = replace(objective, pull=self.mu, anchor=order.weights)
            return subject.work(order, devices, objective)

        return subject.with_(work=work)
