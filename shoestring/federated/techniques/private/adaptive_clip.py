"""AdaptiveClip: the clipping norm adapts until a given share of the client updates is not clipped.

    b~  =  (sum_i (b_i - 1/2) + N(0, s^2)) / m + 1/2          b_i: 1 if |u_i| <= C
    C  <-  C exp(-rate (b~ - quantile))

The count of unclipped updates needs noise, too, because it depends on the devices: s = noise times m, the devices
expected. GaussianNoise adds more noise to the updates, so that both together keep its epsilon.
Andrew, Thakkar, McMahan, Ramaswamy 2021, Differentially Private Learning with Adaptive Clipping, arXiv 1905.03871.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import exp, inf
from typing import ClassVar

import torch

from shoestring.core.errors import Mistake
from shoestring.federated.playing.randomness import add_noise
from shoestring.federated.round import Combined, Population, Round, ServerState, Updates
from shoestring.federated.technique import FederatedTechnique, RoundCost
from shoestring.federated.techniques.private.clip import NORM, as_tensor, check_norm, cost_with_clip
from shoestring.federated.techniques.private.norms import clip_to_norm

NEXT, COUNTED, EXPECTED = "AdaptiveClip.norm", "AdaptiveClip.counted", "AdaptiveClip.expected"
LEAST, MOST = 1e-12, 1e12  # norms


@dataclass(frozen=True)
class AdaptiveClip(FederatedTechnique):
    """Let the clipping norm follow the updates.

    Costs: a little more noise in the updates, because the count of unclipped devices is released as well.

    Not for: very few devices a round, whose count is mostly noise.
    """

    quantile: float = 0.5  # share of updates that should not be clipped
    start: float = 1.0  # clipping norm of the first round
    rate: float = 0.2  # how fast the norm adapts
    noise: float = 0.05  # standard deviation of the count's noise, relative to the devices expected

    why: ClassVar[str] = "the clipping norm follows the updates"
    seam: ClassVar[str] = "private"
    slot: ClassVar[str] = "clip"
    order: ClassVar[int] = 60
    on_request: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_norm(self.start, "start", "AdaptiveClip")
        if not 0 < self.quantile < 1:
            raise Mistake(
                f"quantile={self.quantile!r} in AdaptiveClip: it is a share of the updates; give more than 0 and less than 1"
            )
        if not 0 < self.rate < inf:
            raise Mistake(f"rate={self.rate!r} in AdaptiveClip: the norm would never change; give a number above 0")
        if not 0 < self.noise < inf:
            raise Mistake(
                f"noise={self.noise!r} in AdaptiveClip: a count without noise is not private; give a number above 0, such as 0.05"
            )

    def cost(self, cost: RoundCost, /) -> RoundCost:
        """The cost of the first round; later clipping norms depend on the updates."""
        return replace(cost_with_clip(cost, self.start), counted=self.noise * cost.per_round)

    def apply(self, subject: Round, /) -> Round:
        def begin(server: ServerState, population: Population) -> ServerState:
            server = subject.begin(server, population)
            return replace(
                server,
                state={NEXT: as_tensor(self.start), **server.state, EXPECTED: torch.tensor(population.per_round)},
            )

        def combine(server: ServerState, arriving: Iterable[Updates]) -> Combined:
            norm, expected = float(server.state[NEXT]), int(server.state[EXPECTED])
            check_norm(norm, NEXT, "the checkpoint")
            halves: list[float] = []  # sums of b - 1/2

            def clip_and_count() -> Iterator[Updates]:
                for updates in arriving:
                    rows, inside = clip_to_norm(updates.rows, norm)
                    halves.append(float((inside.double() - 0.5).sum()))
                    yield replace(updates, rows=rows)

            found = subject.combine(server, clip_and_count())
            deviation = self.noise * expected
            count = add_noise(torch.tensor([sum(halves)]), deviation, subject.randomness, "count noise", server.round)
            share = float(count) / expected + 0.5
            after = min(max(norm * exp(-self.rate * (share - self.quantile)), LEAST), MOST)
            news = {NORM: as_tensor(norm), NEXT: as_tensor(after), COUNTED: as_tensor(deviation)}
            return replace(found, state={**found.state, **news})

        return subject.with_(begin=begin, combine=combine)
