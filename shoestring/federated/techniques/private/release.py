"""What the rounds of a plan tell of any one device, and the ledger of it that a run keeps.

    play a round  ->  note it in the ledger, on disk  ->  save a checkpoint  ->  tell of it

Nothing of a round leaves the process before it is in the ledger: a kill before that has told nothing and costs nothing. What was told
stands in the checkpoint, and is taken from there; a round that is in the ledger and not in a checkpoint is played again with other noise,
and counts again.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from shoestring.core.errors import Mistake
from shoestring.federated.technique import FederatedTechnique
from shoestring.federated.techniques.private.device_noise import DeviceNoise
from shoestring.federated.techniques.private.gaussian_noise import GaussianNoise
from shoestring.privacy.spending import NAME, ReleasedRound, Spending
from shoestring.runs.folder import Folder

if TYPE_CHECKING:
    from shoestring.federated.prepare import Prepared

TOKEN = "privacy.json"  # in a run's folder: what its rounds are known by in a ledger
FAR = 10  # devices for whom epsilon may be expected not to hold, from which on delta is refused


@dataclass(frozen=True)
class Release:
    """What every round releases: a noisy sum."""

    multiplier: float
    rate: float  # chance of a device to take part
    delta: float
    budget: float  # the epsilon that the run may spend,
    limit: float | None  # and that all runs on the ledger may; None: nothing was stated now
    seeded: bool  # the noise follows from a seed: nothing is private

    def entry(self, run: str, round: int, weights: Tensor | None = None) -> ReleasedRound:
        return ReleasedRound(
            run, round, digest_of(weights), self.multiplier, self.rate, self.delta, self.limit, self.seeded
        )


def release_of(techniques: Sequence[FederatedTechnique], given: Prepared) -> Release | None:
    """None if the rounds have no noise: then nothing is promised, and nothing is kept in a ledger."""
    noise = next((one for one in techniques if isinstance(one, GaussianNoise | DeviceNoise)), None)
    if noise is None:
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
    """Of what is released."""
    return (
        ""
        if weights is None
        else hashlib.blake2b(weights.detach().contiguous().numpy().tobytes(), digest_size=8).hexdigest()
    )


def ledger_path(folder: Path, named: str | None) -> Path:
    return folder / NAME if named is None else Path(named)


def check_room(folder: Path, named: str | None, limit: float | None) -> None:
    """Refuse what begins on a ledger whose population has nothing left, before anything is looked at."""
    spending = Spending(ledger_path(folder, named))
    allowed = min((one for one in (spending.limit, limit) if one is not None), default=inf)
    if spending.delta is not None and allowed < inf and spending.epsilon(exactly=True) >= allowed:
        raise Mistake(
            f"{spending.path}: epsilon {spending.epsilon():.4g} of {allowed:g} that this population may spend is spent, by "
            f"{spending.runs} run{'s' * (spending.runs > 1)}: nothing more may be released of it"
        )


class RunLedger:
    """The privacy ledger, as a run uses it."""

    def __init__(self, release: Release, folder: Folder, named: str | None) -> None:
        self.release, self.folder = release, folder
        self.path = ledger_path(folder.path, named)
        self.spending: Spending | None = None

    def open(self, done: int, lines: int) -> Spending:
        """Take the ledger as it is. `done` rounds of this run stand in its checkpoint, which knew of so many `lines`."""
        token = self.folder.read(TOKEN).get("run")
        if not isinstance(token, str):
            token = secrets.token_hex(8)
            self.folder.write(TOKEN, {"run": token, "ledger": str(self.path)})
        self.spending = Spending(self.path, token, done, lines)
        return self.spending

    @property
    def opened(self) -> Spending:
        assert self.spending is not None, "it was opened"
        return self.spending

    def entry(self, round: int, weights: Tensor | None = None) -> ReleasedRound:
        return self.release.entry(self.opened.run, round, weights)

    def over(self, round: int, rounds: int = 1) -> bool:
        """Whether so many more rounds exceed what may be spent."""
        return self.opened.would_exceed(self.entry(round), self.release.budget, rounds)

    def spend(self, round: int, weights: Tensor) -> bool:
        """Note a round with what is about to be released; False: it may not be."""
        return self.opened.spend(self.entry(round, weights), self.release.budget)

    def knows(self, weights: Tensor) -> bool:
        """Whether these weights are what the ledger says was released."""
        return digest_of(weights) in {one.release for one in self.opened.own}

    def refusal(self, rounds: int) -> str:
        """Why a run that begins may not: all its rounds together would be more than the population may spend; empty if it may."""
        spending, limit = self.opened, [one for one in (self.opened.limit, self.release.limit) if one is not None]
        if spending.own or not limit or not spending.would_exceed(self.entry(0), inf, rounds):
            return ""
        return (
            f"{spending.runs} runs have spent epsilon {spending.epsilon():.4g} of the {min(limit):g} that {self.path} allows, and with "
            f"these {rounds} rounds it would be more: give a smaller --epsilon, or fewer --rounds"
        )

    def warnings(self) -> tuple[str, ...]:
        """What whoever looks on is told as the run begins, or goes on."""
        spending, found = self.opened, []
        if self.release.seeded:
            found.append(NOT_PRIVATE)
        if spending.lost:
            found.append(
                f"{self.path} lacks {spending.lost} lines that it had, or they are damaged: each counts as a round of the kind "
                f"that costs most"
            )
        if others := spending.runs - bool(spending.own):
            found.append(
                f"{others} other run{'s' * (others > 1)} on {self.path} released something of the same devices: all together "
                f"have spent epsilon {spending.epsilon():.4g}"
            )
        return tuple(found)

    def told(self, exactly: bool) -> Mapping[str, float]:
        """Epsilon that this run has spent, and where others have, too, all of them together."""
        own = {"epsilon": self.opened.own_epsilon(exactly=exactly)}
        return own if self.opened.runs < 2 else own | {"epsilon_in_all": self.opened.epsilon(exactly=exactly)}


NOT_PRIVATE = (
    "NOT PRIVATE: the noise follows from --insecure-seed, so whoever knows that number subtracts it; it is for tests, and "
    "epsilon means nothing here"
)


def check_delta_for(delta: float | None, clients: int) -> str:
    """What is to be said of a delta for so many devices; empty if nothing is. One that promises nothing is refused.

    Delta is the chance that epsilon does not hold, and to publish all records of every device with this chance is allowed by it: of N
    devices that is expected to befall delta N. So it should be well below 1 / N; ten devices, or even odds for everyone, are no promise.

    >>> check_delta_for(1e-3, 100)
    ''
    >>> check_delta_for(0.02, 100)[:33]
    '--delta 0.02 for 100 clients: the'
    """
    if delta is None or delta < 1 / clients:
        return ""
    if delta > min(FAR / clients, 0.5):
        raise Mistake(
            f"--delta {delta:g} for {clients:,} clients: it is the chance that epsilon does not hold, and allows to publish all "
            f"records of {delta * clients:,.3g} devices: that is no promise; give less than 1 / clients, such as "
            f"--delta {short_below(1 / clients)}"
        )
    return (
        f"--delta {delta:g} for {clients:,} clients: the records of {delta * clients:,.3g} devices may be published and epsilon still "
        f"hold; less than 1 / clients is usual, such as --delta {short_below(1 / clients)}"
    )


def short_below(number: float) -> str:
    """A tenth of it, with one digit.

    >>> short_below(0.01), short_below(1 / 12)
    ('0.001', '0.008')
    """
    return f"{number / 10:.1g}"
