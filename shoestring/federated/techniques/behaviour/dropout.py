"""Client dropout: every chosen simulated device fails to answer with the same probability, drawn anew in every round.

    P(a chosen device does not answer) = rate

Real devices drop out by themselves: this technique does nothing for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness
from shoestring.federated.playing.seeds import generator_of
from shoestring.federated.round import Order, Round
from shoestring.federated.technique import FederatedTechnique, RoundCost


@dataclass(frozen=True)
class DropOut(FederatedTechnique):
    """Let simulated devices fail to answer, each with the same chance.

    Costs: the updates that are missing.

    Not for: real devices, which drop out by themselves, and regularization: this is not dropout of a network.
    """

    rate: float = 0.1  # probability that a chosen device does not answer

    why: ClassVar[str] = "simulated devices that do not answer"
    seam: ClassVar[str] = "devices"
    order: ClassVar[int] = 48
    on_request: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.rate < 1:
            raise Mistake(
                f"rate={self.rate} in DropOut: it is the probability that a device does not answer; give 0 or more, and less than 1"
            )

    def cost(self, cost: RoundCost, /) -> RoundCost:
        return cost

    def exactness(self, cost: RoundCost, /) -> Exactness:
        return Exactness.CHANGED if self.rate else Exactness.BITS

    def apply(self, subject: Round, /) -> Round:
        def answers(order: Order, name: str) -> bool:
            drawn = torch.rand(
                (), dtype=torch.float64, generator=generator_of(order.seed, "drop out", order.round, name)
            )
            return float(drawn) >= self.rate and subject.answers(order, name)

        return subject.with_(answers=answers)
