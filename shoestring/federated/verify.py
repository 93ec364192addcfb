"""Rounds beside the plain sequential round: does what is promised hold for this job?

    how devices work    in chunks, against one after the other, with the same techniques, every round from the same weights: to rounding,
                        1e-5 of the way that the weights went; models with dropout draw other numbers, of which a few rounds show nothing
    processes           several against one: the same bits
    the plan            against the plain round: what the techniques state. Of `changed` nothing is promised that a few rounds could show

Where devices are stacked there are so many rounds that the commonest shape is recorded in every process, and played.
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
from shoestring.federated.prepare import Prepared
from shoestring.federated.room import FederatedPlan
from shoestring.federated.simulation.cohort import How
from shoestring.federated.simulation.cohort.how import STACKED
from shoestring.federated.simulation.cohort.recorded import AFTER
from shoestring.federated.simulation.cohort.schedule import step_sizes
from shoestring.federated.simulation.simulation import Simulation
from shoestring.federated.technique import FederatedTechnique
from shoestring.planning.room import named

ROUNDS = 2
MOST = 64  # rounds, of devices with very few steps
RECORDED = 2 * AFTER  # steps of a process after which the commonest shape is recorded and played
ROUNDED = 1e-5  # of the way that the weights went: how far sums in another order may lead in a few rounds
SEQUENTIAL = How("sequential", 1, "one device after the other, as a real device works")


@dataclass(frozen=True)
class Verdict:
    what: str
    stated: Exactness
    difference: float  # largest, as a share of the way that the weights went
    kept: bool | None  # None: nothing is promised


@dataclass(frozen=True)
class FederatedVerdict:
    rounds: int
    verdicts: tuple[Verdict, ...]
    losses: tuple[tuple[float, float], ...]  # of every round: plain and sequential, and as planned

    @property
    def kept(self) -> bool:
        return all(one.kept is not False for one in self.verdicts)

    def as_json(self) -> dict[str, Any]:
        return {
            "kept": self.kept,
            "rounds": self.rounds,
            "losses": list(map(list, self.losses)),
            "verdicts": [
                {"what": one.what, "stated": one.stated.word, "difference": one.difference, "kept": one.kept}
                for one in self.verdicts
            ],
        }


def verified(given: Prepared, plan: FederatedPlan) -> FederatedVerdict:
    # The same noise every time, or rounds could not be compared; nobody knows the seed, and no weights come out of here
    given = replace(given, asked=replace(given.asked, insecure_seed=secrets.randbits(63)))
    rounds, alone = rounds_of(given), replace(given, how=SEQUENTIAL, processes=1)
    _, plain_losses = played(alone, (), rounds)
    ours = beside_plain(replace(given, processes=1), plan.techniques, rounds)
    verdicts = [ours.verdict]
    if given.processes > 1:
        several, _ = played(given, plan.techniques, rounds)
        verdicts.append(
            verdict(f"{given.processes} processes against one", Exactness.BITS, ours.weights, several, given.row)
        )
    if plan.techniques:
        plain, one_by_one = played(alone, (), ROUNDS)[0], played(alone, plan.techniques, ROUNDS)[0]
        verdicts.append(
            verdict(f"{named(plan.techniques)} against the plain round", plan.exactness, plain, one_by_one, given.row)
        )
    return FederatedVerdict(rounds, tuple(verdicts), tuple(zip(plain_losses, ours.losses, strict=True)))


def rounds_of(given: Prepared) -> int:
    """ROUNDS, or as many more as it takes until all processes play recordings."""
    if given.how.kind != STACKED:
        return ROUNDS
    steps = sum(len(step_sizes(device.records.count, given.job.local)) for device in given.sample) / len(given.sample)
    chunks = given.population.per_round / given.how.chunk / given.processes
    return min(max(ceil(RECORDED / max(steps * chunks, 1)), ROUNDS), MOST)


class BesidePlain(NamedTuple):
    """What rounds came to that were each played by the plain loop, too."""

    verdict: Verdict
    weights: Tensor
    losses: list[float]


def beside_plain(given: Prepared, techniques: Sequence[FederatedTechnique], rounds: int) -> BesidePlain:
    """Every round as planned, and again one device after the other from where that one began."""
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
    if ours.plainly:
        worst = replace(worst, what=f"{what}: they do not, so they work one after the other ({ours.plainly})")
    return BesidePlain(worst, server.row, losses)


def played(given: Prepared, techniques: Sequence[FederatedTechnique], rounds: int) -> tuple[Tensor, list[float]]:
    """The weights after some rounds, and the loss of each."""
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
    way = float((expected - begin).abs().max()) or 1.0
    difference = float((expected - found).abs().max()) / way
    same = torch.equal(expected, found)
    rounded = (
        ROUNDED + torch.finfo(torch.float32).eps * float(begin.abs().max()) / way
    )  # of weights that hardly move, rounding is all
    kept = {Exactness.BITS: same, Exactness.ROUNDING: difference <= rounded}.get(stated)
    return Verdict(what, stated, difference, kept)
