"""Checks a plan on this job by playing some rounds twice: as planned, and by the plain sequential loop.

    simulation    devices in chunks against one device after the other, with the same techniques, every round from the same weights.
                  Equal to rounding: 1e-5 of how far the weights moved. With dropout the random numbers differ, so nothing can be checked
    processes     several processes against one: the same bits
    techniques    the plan against the plain round: as equal as the techniques promise. If they change the result, a few rounds can't
                  show whether that is right

Stacked devices play so many rounds that every process records the commonest shape and replays the recording.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoestring.core.exactness import Exactness
from shoestring.federated.planning.prepare import Prepared
from shoestring.federated.room import FederatedPlan
from shoestring.federated.simulation.cohort import MethodChoice
from shoestring.federated.simulation.cohort.method_choice import STACKED
from shoestring.federated.simulation.cohort.schedule import step_sizes
from shoestring.federated.simulation.cohort.stacked.recording import AFTER
from shoestring.federated.simulation.simulation import Simulation
from shoestring.federated.technique import FederatedTechnique
from shoestring.planning.plan import techniques_text

ROUNDS = 2
MOST = 64  # rounds at most, for devices with very few steps
RECORDED = 2 * AFTER  # steps after which a process has recorded the commonest shape and replayed it
ROUNDED = 1e-5  # relative to how far the weights moved: what summing in another order may change in a few rounds
SEQUENTIAL = MethodChoice("sequential", 1, "one device after the other, as a real device works")


@dataclass(frozen=True)
class Verdict:
    what: str
    stated: Exactness
    difference: float  # largest, relative to how far the weights moved
    kept: bool | None  # whether the promise holds; None: nothing is promised


@dataclass(frozen=True)
class FederatedVerdict:
    rounds: int
    verdicts: tuple[Verdict, ...]
    losses: tuple[tuple[float, float], ...]  # of every round: of the plain sequential loop, and of the plan

    @property
    def holds(self) -> bool:
        return all(one.kept is not False for one in self.verdicts)

    def as_json(self) -> dict[str, Any]:
        return {
            "kept": self.holds,
            "rounds": self.rounds,
            "losses": list(map(list, self.losses)),
            "verdicts": [
                {"what": one.what, "stated": one.stated.word, "difference": one.difference, "kept": one.kept}
                for one in self.verdicts
            ],
        }


def verify_plan(given: Prepared, plan: FederatedPlan) -> FederatedVerdict:
    # Seeded noise, so that rounds can be compared. It stays private: nobody knows this seed, and no weights are returned
    given = replace(given, asked=replace(given.asked, insecure_seed=secrets.randbits(63)))
    rounds, alone = rounds_to_verify(given), replace(given, how=SEQUENTIAL, processes=1)
    _, plain_losses = play_rounds(alone, (), rounds)
    ours = compare_with_sequential(replace(given, processes=1), plan.techniques, rounds)
    verdicts = [ours.verdict]
    if given.processes > 1:
        several, _ = play_rounds(given, plan.techniques, rounds)
        verdicts.append(
            verdict(f"{given.processes} processes against one", Exactness.BITS, ours.weights, several, given.row)
        )
    if plan.techniques:
        plain, one_by_one = play_rounds(alone, (), ROUNDS)[0], play_rounds(alone, plan.techniques, ROUNDS)[0]
        verdicts.append(
            verdict(
                f"{techniques_text(plan.techniques)} against the plain round",
                plan.exactness,
                plain,
                one_by_one,
                given.row,
            )
        )
    return FederatedVerdict(rounds, tuple(verdicts), tuple(zip(plain_losses, ours.losses, strict=True)))


def rounds_to_verify(given: Prepared) -> int:
    """ROUNDS, or as many as it takes until every process replays a recording."""
    if given.how.kind != STACKED:
        return ROUNDS
    steps = sum(len(step_sizes(device.records.count, given.job.local)) for device in given.sample) / len(given.sample)
    chunks = given.population.per_round / given.how.chunk / given.processes
    return min(max(ceil(RECORDED / max(steps * chunks, 1)), ROUNDS), MOST)


class SequentialComparison(NamedTuple):
    """The outcome of rounds each of which the sequential loop played, too."""

    verdict: Verdict
    weights: Tensor
    losses: list[float]


def compare_with_sequential(
    given: Prepared, techniques: Sequence[FederatedTechnique], rounds: int
) -> SequentialComparison:
    """Play every round as planned, and again sequentially from the same server state; keep the worst difference."""
    ours, plain = Simulation(given, techniques), Simulation(replace(given, how=SEQUENTIAL), techniques)
    server, verdicts, losses = given.server(ours.parts), [], []
    what = f"devices work {given.how.kind}, {given.how.chunk} at once, against one after the other"
    try:
        for _ in range(rounds):
            plain.states.clear()
            plain.states.update(ours.states)
            right, found = plain.play(server).server.row, ours.play(server)
            verdicts.append(verdict(what, given.how.exactness, right, found.server.row, server.row))
            server = found.server
            losses.append(found.loss)
    finally:
        ours.close()
        plain.close()
    worst = max(verdicts, key=lambda one: (one.kept is False, one.difference))
    if ours.fallback_reason:
        worst = replace(worst, what=f"{what}: they do not, so they work one after the other ({ours.fallback_reason})")
    return SequentialComparison(worst, server.row, losses)


def play_rounds(given: Prepared, techniques: Sequence[FederatedTechnique], rounds: int) -> tuple[Tensor, list[float]]:
    """The weights after some rounds, and every round's loss."""
    simulation = Simulation(given, techniques)
    server, losses = given.server(simulation.parts), []
    try:
        for _ in range(rounds):
            found = simulation.play(server)
            server = found.server
            losses.append(found.loss)
    finally:
        simulation.close()
    return server.row, losses


def verdict(what: str, stated: Exactness, expected: Tensor, found: Tensor, begin: Tensor) -> Verdict:
    moved = float((expected - begin).abs().max()) or 1.0
    difference = float((expected - found).abs().max()) / moved
    same = torch.equal(expected, found)
    rounded = (
        ROUNDED + torch.finfo(torch.float32).eps * float(begin.abs().max()) / moved
    )  # if weights hardly move, rounding dominates
    kept = {Exactness.BITS: same, Exactness.ROUNDING: difference <= rounded}.get(stated)
    return Verdict(what, stated, difference, kept)
