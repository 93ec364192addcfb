"""Admission: a request that can't be answered in time is refused at once, so that those before it are answered in time.

    a batch takes     base + per_row * rows + per_token * tokens                 seconds, affine, measured at start
    work ahead        what the replicas are at  +  the batches that wait
    answered in       work ahead / replicas  +  its own part of its batch  +  (1 - 1 / replicas) the others' part of it

The last line bounds list scheduling (Graham, Bounds on Multiprocessing Timing Anomalies, 1969).

A client that is told 503 and when to come back can go elsewhere; one that waits in a long queue is told nothing, and when its answer
comes it has gone (Welsh, Culler: Adaptive Overload Control for Busy Internet Servers, 2003).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from shoestring.serving.batching.policy import SIMILAR, Batching

REMEMBERED = 0.05  # weight of the newest batch in the pace
SLOWEST, FASTEST = 32.0, 1 / 4  # a pace beyond these is of a batch that was interrupted, or of a clock that jumped


@dataclass(frozen=True)
class AffineTime:
    """Seconds that a replica needs for a batch.

    >>> AffineTime(base=0.002, per_row=0.001, per_token=0.0001).seconds(rows=4, tokens=100)
    0.016
    """

    base: float
    per_row: float
    per_token: float

    def seconds(self, rows: int, tokens: int) -> float:
        return self.base + self.per_row * rows + self.per_token * tokens

    def times(self, pace: float) -> AffineTime:
        return AffineTime(self.base * pace, self.per_row * pace, self.per_token * pace)


@dataclass(frozen=True)
class Pace:
    """How much slower batches are now than was measured at start: a geometric mean that forgets."""

    log: float = 0.0

    @property
    def factor(self) -> float:
        return math.exp(self.log)

    def after(self, predicted: float, measured: float) -> Pace:
        """
        >>> pace = Pace()
        >>> for _ in range(200): pace = pace.after(predicted=0.01, measured=0.02)
        >>> round(pace.factor, 2)
        2.0
        """
        if predicted <= 0 or measured <= 0:
            return self
        found = math.log(min(max(measured / predicted, FASTEST), SLOWEST))
        return Pace(self.log + REMEMBERED * (found - self.log))


@dataclass(frozen=True)
class AdmissionLoad:
    """What stands before a request."""

    rows: int  # that wait
    tokens: int  # sum of their lengths
    busy: Sequence[float]  # seconds that every replica still needs for its batch; 0: it is free


@dataclass(frozen=True)
class Turned:
    """A request that is refused: why, and after how many seconds it may come again; infinity: never."""

    reason: str
    retry_after: float


@dataclass(frozen=True)
class Admission:
    """`time` None: nothing is known of the seconds, and only the number of those that wait is limited."""

    how: Batching
    time: AffineTime | None = None
    target: float = inf  # seconds in which requests are to be answered
    margin: float = 0.9  # of the target; the rest is for what the model of the time leaves out
    most_rows: int = 10_000  # that may wait

    def seconds_to_answer(self, load: AdmissionLoad, rows: int, tokens: int, time: AffineTime) -> float:
        """Seconds until samples that come now have their answers.

        >>> admission = Admission(Batching(tokens=100, packed=True))
        >>> second = AffineTime(base=0.0, per_row=0.0, per_token=0.01)  # a second for a full batch
        >>> admission.seconds_to_answer(AdmissionLoad(0, 0, [0.0]), 1, 50, second)
        0.5
        >>> admission.seconds_to_answer(AdmissionLoad(10, 200, [1.0, 0.0]), 1, 50, second)  # 1 + 2 seconds of work for two replicas
        2.25
        """
        waste = 1.0 if self.how.packed else 1 / SIMILAR  # padding, at most
        waiting = math.ceil(load.tokens * waste)
        ahead = sum(load.busy) + self.seconds(load.rows, waiting, time)
        company = min(
            waiting, max(self.how.tokens - tokens, 0)
        )  # of others in the same batch, which one replica computes
        replicas = max(len(load.busy), 1)
        return ahead / replicas + (1 - 1 / replicas) * time.per_token * company + self.seconds(rows, tokens, time)

    def seconds(self, rows: int, tokens: int, time: AffineTime) -> float:
        """What one replica needs for so much, in as few batches as can be."""
        batches = max(math.ceil(tokens / self.how.tokens), math.ceil(rows / self.how.rows))
        return batches * time.base + time.per_row * rows + time.per_token * tokens

    def refusal(
        self, load: AdmissionLoad, rows: int, tokens: int, pace: float = 1.0, within: float = inf
    ) -> Turned | None:
        """Why a request is refused; None: it is accepted. `within`: seconds until its own deadline.

        Without anybody before it, a request is computed even if it alone takes longer than the target: it would never be answered else.
        """
        if load.rows + rows > self.most_rows:
            return Turned(f"{load.rows:,} requests wait, and at most {self.most_rows:,} may", 1.0)
        if self.time is None:
            return Turned("its deadline is over", inf) if within <= 0 else None
        time = self.time.times(pace)
        alone = self.seconds_to_answer(AdmissionLoad(0, 0, [0.0] * len(load.busy)), rows, tokens, time)
        if alone > within:
            return Turned(
                f"it takes {alone:.3g} s without anybody before it, and its deadline is in {within:.3g} s", inf
            )
        expected, most = (
            self.seconds_to_answer(load, rows, tokens, time),
            min(max(self.target * self.margin, alone), within),
        )
        if expected <= most:
            return None
        return Turned(f"it would be answered in {expected:.3g} s, later than {most:.3g} s", expected - most)
