"""What the rounds of a plan tell of any one device, for the privacy ledger."""
from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from shoestring.core.technique import text
from shoestring.federated.private.device_noise import DeviceNoise
from shoestring.federated.private.gaussian_noise import GaussianNoise
from shoestring.federated.technique import FederatedTechnique
from shoestring.privacy.spending import Entry

if TYPE_CHECKING:
    from shoestring.federated.prepare import Prepared


@dataclass(frozen=True)
class Release:
    """What every round releases: a noisy sum."""

    multiplier: float
    rate: float         # chance of a device to take part
    delta: float
    budget: float       # the epsilon that may be spent
    digest: str         # of the seed, the job's file and flags, and all else that a round is known to follow from

    def entry(self, round: int) -> Entry:
        return Entry(round, self.digest, self.multiplier, self.rate, self.delta)


def release_of(techniques: Sequence[FederatedTechnique], given: Prepared, job: str) -> Release | None:
    """`job`: what the job is known by. None if the rounds have no noise: then nothing is promised, and nothing is kept in a ledger."""
    noise = next((one for one in techniques if isinstance(one, GaussianNoise | DeviceNoise)), None)
    if noise is None:
        return None
    population, asked = given.population, given.asked
    rate = population.per_round / population.count
    digest = digest_of(job, given.job.seed, population.count, population.per_round, *map(text, techniques))
    return Release(noise.multiplier, rate, asked.delta or 0.0, inf if asked.epsilon is None else asked.epsilon, digest)


def digest_of(*words: object) -> str:
    return hashlib.blake2b("\x1f".join(map(str, words)).encode(), digest_size=16).hexdigest()
