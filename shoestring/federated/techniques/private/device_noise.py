"""DeviceNoise: every device adds its share of the noise itself, and the shares sum up to what the server would have added.

    device      u_i + N(0, (z C)^2 / a)                  a devices are asked in the round
    server      + N(0, (z C)^2 (a - k) / a)              the shares of those of whom nothing came: k answered
    sum         sum_i u_i + N(0, (z C)^2), always

So the sum is that of GaussianNoise, however many answer, and epsilon is the same. It is a promise about the sum: one device's own row has
only its share of the noise, so this assumes that the server, or who listens to it, looks at nothing but the sum (secure aggregation), that
devices add what they should, and that the server adds what is missing. Who is asked is drawn by a chance that does not depend on anything.
McMahan, Ramage, Talwar, Zhang 2018, arXiv 1710.06963, for the sum; Kairouz, Liu, Steinke 2021, The Distributed Discrete Gaussian Mechanism
for Federated Learning with Secure Aggregation, arXiv 2102.06387, for what is assumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import ClassVar

import torch

from shoestring.federated.randomness import with_noise
from shoestring.federated.round import (
    Combined,
    DeviceGroup,
    DeviceView,
    Objective,
    Order,
    Population,
    Round,
    ServerState,
    Updates,
)
from shoestring.federated.technique import FederatedTechnique, RoundCost
from shoestring.federated.techniques.private.clip import NORM
from shoestring.federated.techniques.private.sampling import (
    ASKED,
    CHOSEN,
    alike,
    begun,
    check_multiplier,
    choose,
    cost_with_noise,
    noise_refusal,
    noisy,
    norm_of,
)


@dataclass(frozen=True)
class DeviceNoise(FederatedTechnique):
    """Let every device add its share of the private noise.

    Costs: the same noise in the sum as `GaussianNoise`.

    Not for: servers that look at single updates: the promise holds for the sum alone.
    """

    multiplier: float = 1.0  # z: standard deviation of the sum's noise, in units of the clipping norm

    why: ClassVar[str] = "devices add the noise that hides them in the sum"
    seam: ClassVar[str] = "private"
    slot: ClassVar[str] = "combine"
    needs: ClassVar[tuple[str, ...]] = ("DeviceClip",)
    order: ClassVar[int] = 31

    def __post_init__(self) -> None:
        check_multiplier(self.multiplier, "DeviceNoise")

    @classmethod
    def choices(cls, cost: RoundCost, /) -> tuple[DeviceNoise, ...]:
        return ()

    def refusal(self, cost: RoundCost, /) -> str:
        return noise_refusal(cost, "DeviceClip(norm=1.0), which devices do before they add noise")

    def drift(self, cost: RoundCost, /) -> float:
        return self.cost(cost).error - cost.error

    def cost(self, cost: RoundCost, /) -> RoundCost:
        return replace(
            cost_with_noise(cost, self.multiplier, self.multiplier), clip=0.0, down=cost.down + 8
        )  # a, in 64 bits

    def apply(self, subject: Round, /) -> Round:
        def begin(server: ServerState, population: Population) -> ServerState:
            return begun(subject.begin(server, population), population, subject.randomness)

        def order(server: ServerState, group: DeviceGroup) -> Order:
            made = subject.order(server, group)
            return replace(made, extras={**made.extras, ASKED: torch.tensor(len(server.drawn[CHOSEN]))})

        def work(order: Order, devices: Sequence[DeviceView], objective: Objective) -> Updates:
            found = subject.work(order, devices, objective)
            deviation = self.multiplier * float(order.extras[NORM]) / sqrt(max(int(order.extras[ASKED]), 1))
            noisy_rows = [
                with_noise(row, deviation, subject.randomness, "noise", order.round, name).to(row.dtype)
                for row, name in zip(found.rows, found.names, strict=True)
            ]
            return replace(found, rows=torch.stack(noisy_rows))

        def combine(server: ServerState, arriving: Iterable[Updates]) -> Combined:
            found = subject.combine(server, alike(arriving))
            asked = len(server.drawn[CHOSEN])
            lacking = 1 - found.weight / asked if asked else 1.0
            return noisy(
                server,
                found,
                self.multiplier * norm_of(found) * sqrt(max(lacking, 0.0)),
                subject.randomness,
                "missing noise",
            )

        return subject.with_(begin=begin, choose=choose, order=order, work=work, combine=combine)
