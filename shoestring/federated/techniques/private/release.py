"""How a private run releases its rounds, and keeps the privacy ledger.

    play a round  ->  write it to the ledger on disk  ->  save a checkpoint  ->  report the round

Nothing of a round leaves the process before it is in the ledger, so a kill before that reveals nothing and costs
nothing. A resumed run repeats the reports that its checkpoint has. A round that is in the ledger but in no checkpoint
is played again with new noise, and counts twice.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from shoestring.core.errors import Mistake
from shoestring.federated.technique import FederatedTechnique
from shoestring.federated.techniques.private.device_noise import DeviceNoise
from shoestring.federated.techniques.private.gaussian_noise import GaussianNoise
from shoestring.privacy.ledger import NAME, PrivacyLedger, ReleasedRound
from shoestring.runs.folder import Folder

if TYPE_CHECKING:
    from shoestring.federated.planning.prepare import Prepared

TOKEN = "privacy.json"  # file in a run's folder with the token that identifies the run in a ledger
FAR = 10  # delta is refused if epsilon is expected not to hold for more devices than this


@dataclass(frozen=True)
class Release:
    """What every round of a run releases: a noisy sum with these settings."""

    multiplier: float  # noise multiplier
    rate: float  # sampling rate: probability that a device takes part
    delta: float
    budget: float  # epsilon that this run may spend
    limit: float | None  # epsilon that all runs on the ledger may spend together; None: not stated by this run
    seeded: bool  # the noise follows from a seed: nothing is private

    def entry(self, run: str, round: int, weights: Tensor | None = None) -> ReleasedRound:
        return ReleasedRound(
            run, round, digest_of(weights), self.multiplier, self.rate, self.delta, self.limit, self.seeded
        )


def noise_of(techniques: Iterable[FederatedTechnique]) -> GaussianNoise | DeviceNoise | None:
    """The technique that makes a plan private; None if none does."""
    return next((one for one in techniques if isinstance(one, GaussianNoise | DeviceNoise)), None)


def release_of(techniques: Sequence[FederatedTechnique], given: Prepared) -> Release | None:
    """How a plan's rounds are released; None if they have no noise, and so need no ledger."""
    if (noise := noise_of(techniques)) is None:
        return None
    population, asked = given.population, given.asked
    return Release(
        noise.multiplier,
        population.per_round / population.count,
        asked.delta or 0.0,
        inf if asked.epsilon is None else asked.epsilon,
        asked.ledger_epsilon,
        not given.randomness.secret,
    )


def digest_of(weights: Tensor | None) -> str:
    """Digest of released weights; empty for None."""
    return (
        ""
        if weights is None
        else hashlib.blake2b(weights.detach().contiguous().numpy().tobytes(), digest_size=8).hexdigest()
    )


def ledger_path(folder: Path, named: str | None) -> Path:
    return folder / NAME if named is None else Path(named)


def check_room(folder: Path, named: str | None, limit: float | None) -> None:
    """Refuse a run whose ledger has no epsilon left, before any record is read."""
    spending = PrivacyLedger(ledger_path(folder, named))
    allowed = min((one for one in (spending.limit, limit) if one is not None), default=inf)
    if spending.delta is not None and allowed < inf and spending.epsilon(exactly=True) >= allowed:
        raise Mistake(
            f"{spending.path}: {spending.runs} run{'s' * (spending.runs > 1)} spent epsilon {spending.epsilon():.4g} of the "
            f"{allowed:g} that this population may spend: nothing more may be released"
        )


class RunLedger:
    """A run's access to the privacy ledger."""

    def __init__(self, release: Release, folder: Folder, named: str | None) -> None:
        self.release, self.folder = release, folder
        self.path = ledger_path(folder.path, named)
        self.spending: PrivacyLedger | None = None
        self.copied = False  # whether the run's own ledger is in another folder than the one it began in

    def open(self, done: int, lines: int) -> PrivacyLedger:
        """Open the ledger. The run's checkpoint has `done` rounds, and was written when the ledger had so many `lines`."""
        kept, place = self.folder.read(TOKEN), os.stat(self.folder.path).st_ino
        token = kept.get("run")
        self.copied = self.path.parent == self.folder.path and kept.get("place", place) != place
        if not isinstance(token, str):
            token = secrets.token_hex(8)
            self.folder.write(TOKEN, {"run": token, "ledger": str(self.path), "place": place})
        self.spending = PrivacyLedger(self.path, token, done, lines)
        return self.spending

    @property
    def ledger(self) -> PrivacyLedger:
        assert self.spending is not None, "it was opened"
        return self.spending

    def entry(self, round: int, weights: Tensor | None = None) -> ReleasedRound:
        return self.release.entry(self.ledger.run, round, weights)

    def over(self, round: int, rounds: int = 1) -> bool:
        """Whether so many more rounds would exceed the run's budget or the limit of all runs."""
        return self.ledger.would_exceed(self.entry(round), self.release.budget, rounds)

    def spend(self, round: int, weights: Tensor) -> bool:
        """Write a round that is about to be released to the ledger; False if it must not be released."""
        return self.ledger.spend(self.entry(round, weights), self.release.budget)

    def knows(self, weights: Tensor) -> bool:
        """Whether the ledger has a release of these weights by this run."""
        return digest_of(weights) in {one.release for one in self.ledger.own}

    def refusal(self, rounds: int) -> str:
        """Why a new run may not begin: its rounds would exceed the limit of all runs together. Empty if it may."""
        spending, limit = self.ledger, [one for one in (self.ledger.limit, self.release.limit) if one is not None]
        if spending.own or not limit or not spending.would_exceed(self.entry(0), inf, rounds):
            return ""
        return (
            f"{spending.runs} runs have spent epsilon {spending.epsilon():.4g} of the {min(limit):g} that {self.path} allows, and "
            f"these {rounds} rounds would exceed it: give a smaller --epsilon, or fewer --rounds"
        )

    def warnings(self) -> tuple[str, ...]:
        """Warnings to show when the run begins or is resumed."""
        spending, found = self.ledger, []
        if self.release.seeded:
            found.append(NOT_PRIVATE)
        if self.copied:
            found.append(COPIED)
        if spending.lost_rounds:
            found.append(
                f"{self.path} has {spending.lost_rounds} lines missing or damaged: each counts as a round of the most expensive kind"
            )
        if others := spending.runs - bool(spending.own):
            found.append(
                f"{others} other run{'s' * (others > 1)} on {self.path} released results about the same devices: all runs together "
                f"have spent epsilon {spending.epsilon():.4g}"
            )
        return tuple(found)

    def spent_figures(self, exactly: bool) -> Mapping[str, float]:
        """Epsilon spent by this run and, if there are other runs on the ledger, by all of them together."""
        own = {"epsilon": self.ledger.own_epsilon(exactly=exactly)}
        return own if self.ledger.runs < 2 else own | {"epsilon_in_all": self.ledger.epsilon(exactly=exactly)}


SHOWN_EXACTLY = (
    "epsilon covers the weights. The losses, metrics and counts of devices that the run shows, and the error that its plan "
    "predicts, have no noise: of two runs that differ by one device, they tell that device's loss. Show them to nobody who must "
    "not know it"
)
NORM_OF_DEVICES = (
    "the clipping norm was chosen by a few devices' real updates, which epsilon does not count, and is in the plan: give it by "
    "--use 'Clip(norm=...)' and GaussianNoise, or let AdaptiveClip find it privately"
)
COPIED = (
    "this run's folder is a copy, or was moved to another disk: if the original goes on, too, each ledger counts its own rounds "
    "alone, and epsilon is that of both; let one of them go on, or give runs on the same people one --ledger"
)
NOT_OURS = (
    "{} changes private rounds, and what it does is not known here: epsilon holds only if one device still changes the sum by no "
    "more than the clipping norm, and nothing of a device reaches the weights without noise"
)
NOT_PRIVATE = (
    "NOT PRIVATE: the noise follows from --insecure-seed, so whoever knows that number can subtract it; use it for tests only, "
    "epsilon means nothing here"
)


def check_delta_for(delta: float | None, clients: int) -> str:
    """A warning if delta is large for so many devices, empty if it is not. A meaningless delta is refused.

    Delta is the probability that epsilon does not hold. It even allows publishing all records of each device with this
    probability, which would expose delta N of N devices. So it should be well below 1 / N; above 10 / N or 1/2 it is
    refused.

    >>> check_delta_for(1e-3, 100)
    ''
    >>> check_delta_for(0.02, 100)[:33]
    '--delta 0.02 for 100 clients: eps'
    """
    if delta is None or delta < 1 / clients:
        return ""
    if delta > min(FAR / clients, 0.5):
        raise Mistake(
            f"--delta {delta:g} for {clients:,} clients: it is the probability that epsilon does not hold, and allows publishing all "
            f"records of {delta * clients:,.3g} devices, so it protects nobody; give less than 1 / clients, such as "
            f"--delta {short_below(1 / clients)}"
        )
    return (
        f"--delta {delta:g} for {clients:,} clients: epsilon would hold even if the records of {delta * clients:,.3g} devices were "
        f"published; less than 1 / clients is usual, such as --delta {short_below(1 / clients)}"
    )


def short_below(number: float) -> str:
    """A tenth of a number, with one significant digit.

    >>> short_below(0.01), short_below(1 / 12)
    ('0.001', '0.008')
    """
    return f"{number / 10:.1g}"
