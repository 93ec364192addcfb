"""DeviceNoise: distributed differential privacy. Every device adds a share of the noise, and the shares sum up to that
of GaussianNoise.

    device      u_i + N(0, (z C)^2 / a)                  a devices are asked in the round
    server      + N(0, (z C)^2 (a - k) / a)              the shares of the devices that did not answer: k answered
    sum         sum_i u_i + N(0, (z C)^2), always

So the sum has the same noise as with GaussianNoise, however many devices answer, and epsilon is the same. The guarantee
is about the sum: a single row has only a share of the noise. It assumes that everybody sees only the sum (secure
aggregation), that devices add their noise and that the server adds the missing shares. Clients are sampled
independently of everything (Poisson sampling).
McMahan, Ramage, Talwar, Zhang 2018, arXiv 1710.06963, for the sum; Kairouz, Liu, Steinke 2021, The Distributed Discrete
Gaussian Mechanism for Federated Learning with Secure Aggregation, arXiv 2102.06387, for what is assumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import ClassVar

import torch

from shoestring.federated.playing.randomness import add_noise
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
    add_noise_to_sum,
    check_multiplier,
    choose,
    clip_norm_of,
    cost_with_noise,
    draw_participants,
    noise_refusal,
    with_equal_weights,
)


@dataclass(frozen=True)
class DeviceNoise(FederatedTechnique):
    """Let every device add its share of the private noise.

    Costs: the same noise in the sum as `GaussianNoise`.

    Not for: servers that look at single updates: the promise holds for the sum alone.
    """

    multiplier: float = (
        1.0  # z, the noise multiplier: standard deviation of the sum's noise, in units of the clipping norm
    )

    why: ClassVar[str] = "devices add the noise that hides them in the sum"
    seam: ClassVar[str] = "private"
    slot: ClassVar[str] = "combine"
    needs: ClassVar[tuple[str, ...]] = ("DeviceClip",)
    order: ClassVar[int] = 31
    on_request: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_multiplier(self.multiplier, "DeviceNoise")

    def refusal(self, cost: RoundCost, /) -> str:
        return noise_refusal(cost, "DeviceClip(norm=1.0), which devices do before they add noise")

    def drift(self, cost: RoundCost, /) -> float:
        return self.cost(cost).error - cost.error

    def cost(self, cost: RoundCost, /) -> RoundCost:
        return replace(
            cost_with_noise(cost, self.multiplier, self.multiplier), clip=0.0, down=cost.down + 8
        )  # plus 8 bytes for the number of devices asked

    def apply(self, subject: Round, /) -> Round:
        def begin(server: ServerState, population: Population) -> ServerState:
            return draw_participants(subject.begin(server, population), population, subject.randomness)

        def order(server: ServerState, group: DeviceGroup) -> Order:
            made = subject.order(server, group)
            return replace(made, extras={**made.extras, ASKED: torch.tensor(len(server.drawn[CHOSEN]))})

        def work(order: Order, devices: Sequence[DeviceView], objective: Objective) -> Updates:
            found = subject.work(order, devices, objective)
            deviation = self.multiplier * float(order.extras[NORM]) / sqrt(max(int(order.extras[ASKED]), 1))
            noisy_rows = [
                add_noise(row, deviation, subject.randomness, "noise", order.round, name).to(row.dtype)
                for row, name in zip(found.rows, found.names, strict=True)
            ]
            return replace(found, rows=torch.stack(noisy_rows))

        def combine(server: ServerState, arriving: Iterable[Updates]) -> Combined:
            found = subject.combine(server, with_equal_weights(arriving))
            asked = len(server.drawn[CHOSEN])
            lacking = 1 - found.weight / asked if asked else 1.0
            return add_noise_to_sum(
                server,
                found,
                self.multiplier * clip_norm_of(found) * sqrt(max(lacking, 0.0)),
                subject.randomness,
                "missing noise",
            )

        return subject.with_(begin=begin, choose=choose, order=order, work=work, combine=combine)
