"""Stragglers: every simulated device has a fixed speed, drawn from a log-normal distribution. Devices beyond a deadline
are missing.

    time of device i  =  exp(spread z_i)  x  that of the median device,      z_i ~ N(0, 1)

A share 1 - Phi(ln(deadline) / spread) of all devices always misses the deadline. Times do not depend on how many
records a device has. Real devices have speeds of their own: this technique does nothing for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from typing import ClassVar

import torch

from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness
from shoestring.federated.playing.seeds import generator_of
from shoestring.federated.round import Order, Round
from shoestring.federated.technique import FederatedTechnique, RoundCost


@dataclass(frozen=True)
class Slow(FederatedTechnique):
    """Give simulated devices unequal speeds, and a deadline.

    Costs: the updates that come too late.

    Not for: real devices, which have speeds of their own.
    """

    spread: float = 1.0  # standard deviation of the logarithm of a device's time
    deadline: float = 0.0  # in units of the median device's time; slower devices are missing; 0: no deadline

    why: ClassVar[str] = "simulated devices of unequal speed"
    seam: ClassVar[str] = "devices"
    order: ClassVar[int] = 48
    on_request: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.spread <= 10:
            raise Mistake(
                f"spread={self.spread} in Slow: it is the standard deviation of the logarithm of a device's time; give 0 to 10"
            )
        if not self.deadline >= 0:
            raise Mistake(
                f"deadline={self.deadline} in Slow: it is a multiple of the median device's time; give a number such as 2; 0: none"
            )

    def cost(self, cost: RoundCost, /) -> RoundCost:
        return cost

    def exactness(self, cost: RoundCost, /) -> Exactness:
        return Exactness.CHANGED if self.deadline else Exactness.BITS

    def apply(self, subject: Round, /) -> Round:
        def duration(order: Order, name: str) -> float:
            drawn = torch.randn((), dtype=torch.float64, generator=generator_of(order.seed, "speed", name))
            return exp(self.spread * float(drawn)) * subject.duration(order, name)

        def answers(order: Order, name: str) -> bool:
            return (not self.deadline or duration(order, name) <= self.deadline) and subject.answers(order, name)

        return subject.with_(duration=duration, answers=answers)
