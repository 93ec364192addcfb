"""GaussianNoise: DP-FedAvg. The server adds noise to the sum of clipped updates, so that nobody can tell whether one
device took part.

    update  =  (sum_i u_i + N(0, (z C)^2 I)) / m          |u_i| <= C, m devices expected, each takes part with probability m / N

Epsilon protects all records of one device (adding or removing them) against anybody who sees the weights of all rounds.
It does not cover what else is reported of a round: losses, metrics, counts. With AdaptiveClip, noise is split between
the updates and the count:

    z^-2 = z_u^-2 + (2 s)^-2          z: the promised multiplier; z_u: the one used for the updates; s: noise of the count

McMahan, Ramage, Talwar, Zhang 2018, Learning Differentially Private Recurrent Language Models, arXiv 1710.06963;
Andrew, Thakkar, McMahan, Ramaswamy 2021, Differentially Private Learning with Adaptive Clipping, arXiv 1905.03871.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from shoestring.core.errors import Mistake
from shoestring.federated.round import Combined, Population, Round, ServerState, Updates
from shoestring.federated.technique import FederatedTechnique, RoundCost
from shoestring.federated.techniques.private.adaptive_clip import COUNTED
from shoestring.federated.techniques.private.sampling import (
    add_noise_to_sum,
    check_multiplier,
    choose,
    clip_norm_of,
    cost_with_noise,
    draw_participants,
    noise_refusal,
    with_equal_weights,
)
from shoestring.privacy.account import noise_for


@dataclass(frozen=True)
class GaussianNoise(FederatedTechnique):
    """Add Gaussian noise to the sum of clipped updates, calibrated to an epsilon.

    Costs: accuracy, the more the fewer devices take part in a round, and a checkpoint in every round.

    Not for: small populations: the noise may be larger than what they
    have learned.
    """

    multiplier: float = (
        1.0  # z, the noise multiplier: standard deviation of the sum's noise, in units of the clipping norm
    )

    why: ClassVar[str] = "noise in the sum hides every single device"
    seam: ClassVar[str] = "private"
    slot: ClassVar[str] = "combine"
    needs: ClassVar[tuple[str, ...]] = ("Clip", "AdaptiveClip", "DeviceClip")
    order: ClassVar[int] = 62

    def __post_init__(self) -> None:
        check_multiplier(self.multiplier, "GaussianNoise")

    @classmethod
    def choices(cls, cost: RoundCost, /) -> tuple[GaussianNoise, ...]:
        """The noise that the wanted epsilon needs."""
        if cost.wanted == inf or not cost.delta or not cost.clip:
            return ()
        try:
            return (cls(noise_for(cost.wanted, cost.per_round / cost.clients, cost.rounds, cost.delta)),)
        except Mistake:  # no noise is enough
            return ()

    def refusal(self, cost: RoundCost, /) -> str:
        if cost.counted and 2 * cost.counted <= self.multiplier:
            return (
                f"AdaptiveClip's count has noise of {cost.counted:g} devices, which alone spends more privacy than multiplier="
                f"{self.multiplier:g} promises: give AdaptiveClip a noise of more than {self.multiplier / 2 / cost.per_round:.2g}"
            )
        return noise_refusal(cost, "Clip(norm=1.0), which the server does after decoding")

    def drift(self, cost: RoundCost, /) -> float:
        return self.cost(cost).error - cost.error

    def cost(self, cost: RoundCost, /) -> RoundCost:
        return cost_with_noise(cost, self.multiplier, update_multiplier(self.multiplier, cost.counted))

    def apply(self, subject: Round, /) -> Round:
        def begin(server: ServerState, population: Population) -> ServerState:
            return draw_participants(subject.begin(server, population), population, subject.randomness)

        def combine(server: ServerState, arriving: Iterable[Updates]) -> Combined:
            found = subject.combine(server, with_equal_weights(arriving))
            counted = float(found.state[COUNTED]) if COUNTED in found.state else 0.0
            return add_noise_to_sum(
                server,
                found,
                update_multiplier(self.multiplier, counted) * clip_norm_of(found),
                subject.randomness,
                "noise",
            )

        return subject.with_(begin=begin, choose=choose, combine=combine)


def update_multiplier(multiplier: float, counted: float) -> float:
    """z_u of the formula above: the noise multiplier for the updates.

    >>> update_multiplier(1.0, 0.0), round(update_multiplier(1.0, 2.5), 4)
    (1.0, 1.0206)
    """
    return float((multiplier**-2 - (2 * counted) ** -2) ** -0.5) if counted else multiplier
