"""What a private round needs, whether devices or the server add the noise: Poisson sampling, equal weights, a fixed
divisor.

    every device takes part with probability q = per round / clients, independently of the others (Poisson sampling)
    update  =  (sum of clipped updates + noise) / per round          the expected number of devices, not the number that came

Weights by samples, or dividing by the number of devices that came, would reveal something that no noise covers. The
cohort is drawn like the noise (`randomness`) and never written to a file: privacy amplification by sampling requires
that nobody knows who took part.
McMahan, Ramage, Talwar, Zhang 2018, Learning Differentially Private Recurrent Language Models, arXiv 1710.06963.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf

import torch
from torch import Tensor

from shoestring.core.command_line.extras import EXTRAS
from shoestring.core.errors import Mistake
from shoestring.federated.playing.randomness import Randomness, add_noise
from shoestring.federated.round import Combined, DeviceGroup, Population, ServerState, Updates
from shoestring.federated.technique import RoundCost
from shoestring.federated.techniques.private.clip import NORM
from shoestring.privacy.account import epsilon_of
from shoestring.privacy.ledger import MOST_NOISE

EXPECTED = "Noise.expected"  # key in the server's state: devices expected in a round
CHOSEN = "Noise.chosen"  # key in a round's random choices: numbers of the devices that take part
ASKED = "Noise.asked"  # key in an order: how many devices take part


def choose(server: ServerState, population: Population) -> Sequence[DeviceGroup]:
    """The cohort that `draw_participants` drew at the start of the round; it may be empty."""
    chosen = server.drawn[CHOSEN].tolist()
    return [DeviceGroup(tuple(map(population.name, chosen)))] if chosen else []


def draw_participants(server: ServerState, population: Population, source: Randomness) -> ServerState:
    """The server's state with the expected number of devices and the cohort, in which every device is drawn
    independently."""
    drawn = source.uniforms(population.count, "choose", server.round)
    chosen = (drawn < population.per_round / population.count).nonzero().flatten()
    return replace(
        server,
        state={**server.state, EXPECTED: torch.tensor(population.per_round)},
        drawn={**server.drawn, CHOSEN: chosen},
    )


def with_equal_weights(arriving: Iterable[Updates]) -> Iterator[Updates]:
    """Give all updates the same weight, and refuse extras and statistics, which no noise covers.

    Rows become 64-bit numbers, so that rounding in their sum does not add to the sensitivity.
    """
    for updates in arriving:
        if updates.extras:
            raise Mistake(
                f"devices send {', '.join(updates.extras)} beside their updates, which no noise covers, so epsilon would not hold: "
                f"leave out the technique that sends it"
            )
        if updates.statistics is not None:
            raise Mistake(
                "devices send statistics of norm layers, which no noise covers: give --statistics frozen or local"
            )
        yield replace(updates, rows=updates.rows.double(), counts=torch.ones_like(updates.counts))


def add_noise_to_sum(server: ServerState, found: Combined, deviation: float, source: Randomness, word: str) -> Combined:
    """Turn the mean of equal weights back into a sum, add noise, and divide by the expected number of devices."""
    expected = int(server.state[EXPECTED])
    total = add_noise(found.update * found.weight, deviation, source, word, server.round)
    return replace(found, update=(total / expected).to(server.weights.dtype), weight=float(expected))


def clip_norm_of(found: Combined) -> float:
    norm: Tensor | None = found.state.get(NORM)
    if norm is None:
        raise Mistake("noise without clipping: no noise is enough for updates of any norm; add Clip(norm=1.0)")
    return float(norm)


def cost_with_noise(cost: RoundCost, multiplier: float, added: float) -> RoundCost:
    """The cost with noise. `added`: the noise multiplier used for the updates, larger than `multiplier` if a count has
    noise, too.

        error  =  d (z C)^2 / m^2 / |u|^2          d numbers, m devices, u: the update after codecs

    The error is relative to the update after codecs. Relative to the exact update, dropping numbers and clipping harder
    would look like less noise.
    """
    error = inf
    if cost.evidence is not None and (square := cost.evidence.remaining_square(cost.per_round)):
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
        return f"an update can have any norm, so no noise is enough for an epsilon: add {clip}"
    if not cost.delta:
        return "epsilon means nothing without a delta, the probability that it does not hold: give --delta 1e-6, or less than 1 / clients"
    return EXTRAS["private"].refusal


def check_multiplier(multiplier: float, name: str) -> None:
    if not 0 < multiplier <= MOST_NOISE:
        raise Mistake(
            f"multiplier={multiplier!r} in {name}: it is the noise in units of the clipping norm; give a number above 0 and "
            f"at most {MOST_NOISE:,.0f}"
        )
