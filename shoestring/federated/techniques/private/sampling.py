"""What noise for a promise asks of a round, wherever it is added: who takes part, with what weight, and what is divided by.

    every device takes part with the chance q = per round / clients, whatever the others do (Poisson sampling)
    update  =  (sum of clipped updates + noise) / per round          the expected number, not the number that came

Every update weighs the same and the number of those who came is not divided by: what either tells of a device, no noise would cover.
Who takes part is drawn like the noise (`randomness`), and no file has it: that a device may not be in a round is a part of the promise.
McMahan, Ramage, Talwar, Zhang 2018, Learning Differentially Private Recurrent Language Models, arXiv 1710.06963.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf

import torch
from torch import Tensor

from shoestring.core.errors import Mistake
from shoestring.core.extras import EXTRAS
from shoestring.federated.randomness import Randomness, with_noise
from shoestring.federated.round import Combined, DeviceGroup, Population, ServerState, Updates
from shoestring.federated.technique import RoundCost
from shoestring.federated.techniques.private.clip import NORM
from shoestring.privacy.account import epsilon_of
from shoestring.privacy.spending import MOST_NOISE

EXPECTED = "Noise.expected"  # of the server's state: devices of a round
CHOSEN = "Noise.chosen"  # of what a round draws: numbers of the devices that take part
ASKED = "Noise.asked"  # of an order: how many those are


def choose(server: ServerState, population: Population) -> Sequence[DeviceGroup]:
    """The devices that were drawn as the round began, in the order of their numbers; there may be nobody."""
    chosen = server.drawn[CHOSEN].tolist()
    return [DeviceGroup(tuple(map(population.name, chosen)))] if chosen else []


def begun(server: ServerState, population: Population, source: Randomness) -> ServerState:
    """The server, knowing how many devices are expected, and who takes part: every device by a draw of its own."""
    drawn = source.uniforms(population.count, "choose", server.round)
    chosen = (drawn < population.per_round / population.count).nonzero().flatten()
    return replace(
        server,
        state={**server.state, EXPECTED: torch.tensor(population.per_round)},
        drawn={**server.drawn, CHOSEN: chosen},
    )


def alike(arriving: Iterable[Updates]) -> Iterator[Updates]:
    """All with the same weight, in 64 bits, so that rounding of their sum adds nothing to what one of them can change; what would tell
    more of a device than its update does is refused."""
    for updates in arriving:
        if updates.extras:
            raise Mistake(
                f"devices send {', '.join(updates.extras)} beside their updates, which no noise covers: what epsilon promises "
                f"would not hold; leave out the technique that sends it"
            )
        if updates.statistics is not None:
            raise Mistake(
                "devices send statistics of norm layers, which no noise covers: give --statistics frozen or local"
            )
        yield replace(updates, rows=updates.rows.double(), counts=torch.ones_like(updates.counts))


def noisy(server: ServerState, found: Combined, deviation: float, source: Randomness, word: str) -> Combined:
    """The sum behind a mean of equals, plus noise, by the expected number."""
    expected = int(server.state[EXPECTED])
    total = with_noise(found.update * found.weight, deviation, source, word, server.round)
    return replace(found, update=(total / expected).to(server.weights.dtype), weight=float(expected))


def norm_of(found: Combined) -> float:
    norm: Tensor | None = found.state.get(NORM)
    if norm is None:
        raise Mistake("noise without a clip: without a largest norm no noise is enough; add Clip(norm=1.0)")
    return float(norm)


def cost_with_noise(cost: RoundCost, multiplier: float, added: float) -> RoundCost:
    """The cost with noise; `added`: the multiplier of the updates' own noise, which is more where a count has noise, too.

        error  =  d (z C)^2 / m^2 / |u|^2          d numbers, m devices, u: what codecs left of the update

    Noise is measured by what is left: else to leave some of an update out, and clip the rest shorter, would look like less noise.
    """
    error = inf
    if cost.evidence is not None and (square := cost.evidence.left(cost.per_round)):
        error = cost.size * (added * cost.clip / cost.per_round) ** 2 / square
    epsilon = epsilon_of(multiplier, cost.per_round / cost.clients, cost.rounds, cost.delta)
    return replace(cost, noise=multiplier, epsilon=epsilon, error=cost.error + error)


def noise_refusal(cost: RoundCost, clip: str) -> str:
    if cost.statistics:
        return (
            f"devices send {cost.statistics:,} statistics of norm layers beside their updates, which no noise covers: give "
            f"--statistics frozen or local"
        )
    if not cost.clip:
        return f"an update can be arbitrarily long, so no noise is enough for any promise: add {clip}"
    if not cost.delta:
        return "epsilon means nothing without the chance that it does not hold: give --delta 1e-6, or less than 1 / clients"
    return EXTRAS["private"].refusal


def check_multiplier(multiplier: float, name: str) -> None:
    if not 0 < multiplier <= MOST_NOISE:
        raise Mistake(
            f"multiplier={multiplier!r} in {name}: it is the noise in units of the clipping norm; give a number above 0, and "
            f"{MOST_NOISE:,.0f} at most"
        )
