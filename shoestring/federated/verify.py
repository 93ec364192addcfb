"""A few rounds beside the plain sequential round: does what is promised hold for this job?

    how devices work    in chunks, against one after the other, with the same techniques: to rounding, 1e-5 of the way that the weights
                        went; models with dropout draw other numbers, of which a few rounds show nothing
    processes           several against one: the same bits
    the plan            against the plain round: what the techniques state. Of `changed` nothing is promised that a few rounds could show
"""
from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shoestring.core.exactness import Exactness
from shoestring.federated.cohort import How
from shoestring.federated.prepare import Prepared, parts_of
from shoestring.federated.room import FederatedPlan
from shoestring.federated.round import play
from shoestring.federated.technique import FederatedTechnique
from shoestring.planning.room import named

ROUNDS = 2
ROUNDED = 1e-5   # of the way that the weights went: how far sums in another order may lead in a few rounds
SEQUENTIAL = How("sequential", 1, "one device after the other, as a real device works")


@dataclass(frozen=True)
class Verdict:
    what: str
    stated: Exactness
    difference: float      # largest, as a share of the way that the weights went
    kept: bool | None      # None: nothing is promised


@dataclass(frozen=True)
class Verified:
    rounds: int
    verdicts: tuple[Verdict, ...]
    losses: tuple[tuple[float, float], ...]   # of every round: plain and sequential, and as planned

    @property
    def kept(self) -> bool:
        return all(one.kept is not False for one in self.verdicts)

    def as_json(self) -> dict[str, Any]:
        return {"kept": self.kept, "rounds": self.rounds, "losses": list(map(list, self.losses)), "verdicts": [
            {"what": one.what, "stated": one.stated.word, "difference": one.difference, "kept": one.kept} for one in self.verdicts]}


def verified(given: Prepared, plan: FederatedPlan, rounds: int = ROUNDS) -> Verified:
    # The same noise every time, or rounds could not be compared; nobody knows the seed, and no weights come out of here
    given = replace(given, asked=replace(given.asked, insecure_seed=secrets.randbits(63)))
    alone = replace(given, how=SEQUENTIAL, processes=1)
    plain, plain_losses = played(alone, (), rounds)
    ours, losses = played(given, plan.techniques, rounds)
    one_by_one, _ = played(alone, plan.techniques, rounds) if plan.techniques else (plain, plain_losses)
    way = f"devices work {given.how.kind}, {given.how.chunk} at once, against one after the other"
    verdicts = [verdict(way, given.how.exactness, one_by_one, ours, given.row)]
    if given.processes > 1:
        single, _ = played(replace(given, processes=1), plan.techniques, rounds)
        verdicts.append(verdict(f"{given.processes} processes against one", Exactness.BITS, single, ours, given.row))
    if plan.techniques:
        verdicts.append(verdict(f"{named(plan.techniques)} against the plain round", plan.exactness, plain, one_by_one, given.row))
    return Verified(rounds, tuple(verdicts), tuple(zip(plain_losses, losses, strict=True)))


def played(given: Prepared, techniques: Sequence[FederatedTechnique], rounds: int) -> tuple[Tensor, list[float]]:
    """The weights after a few rounds, and the loss of each."""
    parts = parts_of(given, techniques)
    server, devices, losses = given.server(parts), given.devices(parts), []
    try:
        for _ in range(rounds):
            found = play(parts, server, devices, given.population)
            server = found.server
            losses.append(found.loss)
    finally:
        devices.close()
    return server.weights, losses


def verdict(what: str, stated: Exactness, expected: Tensor, found: Tensor, begin: Tensor) -> Verdict:
    way = float((expected - begin).abs().max()) or 1.0
    difference = float((expected - found).abs().max()) / way
    same = torch.equal(expected, found)
    kept = {Exactness.BITS: same, Exactness.ROUNDING: difference <= ROUNDED}.get(stated)
    return Verdict(what, stated, difference, kept)
