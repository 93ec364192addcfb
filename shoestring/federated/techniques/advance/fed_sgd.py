"""FedSGD: every device takes one full-batch step of plain SGD, so a round is one SGD step on the records of the whole
cohort.

    w  <-  w - lr sum_i n_i g_i / sum_i n_i    g_i: gradient of the mean loss of device i, of n_i records; lr: of the job's Local

Any server optimizer can follow: with FedAdam, the server takes a step of Adam.
McMahan, Moore, Ramage, Hampson, Agüera y Arcas 2017, Communication-Efficient Learning of Deep Networks from
Decentralized Data, arXiv 1602.05629.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from shoestring.core.errors import Mistake
from shoestring.federated.round import Round
from shoestring.federated.technique import FederatedTechnique, RoundCost


@dataclass(frozen=True)
class FedSGD(FederatedTechnique):
    """Let a device take one gradient step with all its records.

    Costs: many more rounds, and so bytes, than devices that take several steps.

    Not for: budgets of bytes: it is here as the yardstick that other rules are compared with.
    """

    why: ClassVar[str] = "one full-batch step per device and round: SGD on the whole cohort"
    seam: ClassVar[str] = "work"
    order: ClassVar[int] = 10
    on_request: ClassVar[bool] = True

    def cost(self, cost: RoundCost) -> RoundCost:
        return cost

    def apply(self, round: Round) -> Round:
        if round.local.optimizer is not None:
            raise Mistake(
                "FedSGD with an optimizer on devices (the Job's or its Local's): it is a step of plain SGD; give Local(lr=...) "
                "without an optimizer, or leave out FedSGD"
            )
        return round.with_(local=replace(round.local, epochs=1, batch=0, steps=1))
