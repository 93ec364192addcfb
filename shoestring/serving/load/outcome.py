"""What a load test found, as plain data: latencies from when a request was due, not from when it could be sent.

A client that waits for an answer before it sends the next request stops asking while the server is slow, and never sees how
long others would have waited. So requests are due at times that are drawn before, and a late start counts as waiting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

PERCENTILES = (0.5, 0.9, 0.99, 0.999)
ANSWERED, REFUSED, FAILED = "answered", "refused", "failed"


@dataclass(frozen=True)
class LoadAnswer:
    """One request."""

    due: float  # seconds since the test began
    ended: float
    status: int  # of HTTP; 0: no answer came
    error: str = ""

    @property
    def kind(self) -> str:
        """Answered; refused at once, because there were too many; or failed."""
        if 200 <= self.status < 300:
            return ANSWERED
        return REFUSED if self.status in (429, 503) else FAILED


@dataclass(frozen=True)
class LoadOutcome:
    """All requests of a test."""

    asked_rate: float  # requests per second
    seconds: float  # from the first that was due to the last that ended
    answered: int
    refused: int
    failed: int
    percentiles: tuple[tuple[float, float], ...]  # of what was answered: share, seconds
    refusal_seconds: float  # 99th percentile of refusals; 0: there was none
    errors: tuple[tuple[str, int], ...]  # most frequent first

    @property
    def answered_rate(self) -> float:
        return self.answered / self.seconds if self.seconds else 0.0


def outcome_of(answers: Sequence[LoadAnswer], asked_rate: float) -> LoadOutcome:
    """
    >>> found = outcome_of([LoadAnswer(0, 0.1, 200), LoadAnswer(1, 1.3, 200), LoadAnswer(1, 1.01, 503)], 2.0)
    >>> found.answered, found.refused, dict(found.percentiles)[0.5], found.answered_rate
    (2, 1, 0.1, 1.5384615384615383)
    """
    kinds = Counter(one.kind for one in answers)
    seconds = [one.ended - one.due for one in answers if one.kind == ANSWERED]
    refusals = [one.ended - one.due for one in answers if one.kind == REFUSED]
    errors = Counter(one.error or f"HTTP {one.status}" for one in answers if one.kind == FAILED)
    return LoadOutcome(
        asked_rate,
        max((one.ended for one in answers), default=0.0) - min((one.due for one in answers), default=0.0),
        kinds[ANSWERED],
        kinds[REFUSED],
        kinds[FAILED],
        tuple((share, percentile_of(seconds, share)) for share in PERCENTILES) if seconds else (),
        percentile_of(refusals, 0.99) if refusals else 0.0,
        tuple(errors.most_common()),
    )


def percentile_of(seconds: Sequence[float], share: float) -> float:
    """The smallest of them that this share of them does not exceed.

    >>> percentile_of([3.0, 1.0, 2.0], 0.5), percentile_of([3.0, 1.0, 2.0], 0.99)
    (2.0, 3.0)
    """
    return sorted(seconds)[max(ceil(share * len(seconds)) - 1, 0)]


def due_times(rate: float, seconds: float, seed: int) -> list[float]:
    """When requests are due that come at random at a rate (Poisson), until the test is over.

    >>> 900 < len(due_times(100, 10, 0)) < 1100, max(due_times(100, 10, 0)) < 10
    (True, True)
    """
    generator = np.random.default_rng(seed)
    count = int(rate * seconds + 6 * (rate * seconds) ** 0.5 + 10)
    times = np.cumsum(generator.exponential(1 / rate, count))
    found: list[float] = times[times < seconds].tolist()
    return found
