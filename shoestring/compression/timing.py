"""How long an answer takes, and how much longer with packed weights.

    latency = median of the plain model + what decoding each packed weight takes, as often as one answer uses it

Both are measured here, on one sample and without gradients. What a percentile is above the median is a share, measured too.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import quantiles
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from shoestring.compression.fidelity import Forward
from shoestring.compression.forms.kinds import KINDS
from shoestring.compression.manifest import Stored
from shoestring.compression.weights import Usage, Weight, looking_at
from shoestring.core.batch import Batch, samples, split
from shoestring.core.errors import Mistake

WARM, LEAST, MOST = 3, 20, 200      # calls: before anything is timed; that are timed at least; at most
ENOUGH = 2.0                        # seconds of timed calls


@dataclass(frozen=True)
class Latency:
    p50: float
    p99: float
    calls: int


def latency(model: nn.Module, forward: Forward, sample: Batch, seconds: float | None = None) -> Latency:
    """Of answers to one sample."""
    with torch.no_grad():
        return timed(lambda: forward(model, sample), ENOUGH if seconds is None else seconds)


def timed(call: Callable[[], Any], seconds: float, least: int = 0) -> Latency:
    for _ in range(WARM):
        call()
    taken: list[float] = []
    while len(taken) < (least or LEAST) or (sum(taken) < seconds and len(taken) < MOST):
        begin = perf_counter()
        call()
        taken.append(perf_counter() - begin)
    marks = quantiles(taken, n=100, method="inclusive")
    return Latency(marks[49], marks[98], len(taken))


def one_sample(batch: Batch) -> Batch:
    """A batch of one; whole, if it can't be cut."""
    try:
        return split(batch, samples(batch))[0]
    except Mistake:
        return batch


@dataclass
class Clock:
    """Latencies of a model's answers, with weights packed one way or another."""

    plain: Latency
    usage: Mapping[str, Usage]        # of weights, in one answer
    known: dict[tuple[Any, ...], float] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return self.plain.p50

    def tail(self, percentile: float) -> float:
        """By what factor that percentile is above the median."""
        return 1.0 if percentile <= 0.5 else max(self.plain.p99 / self.plain.p50, 1.0)

    def decoding(self, stored: Stored) -> float:
        """Seconds that an answer takes longer with a weight in this form, which is decoded as often as it is used; below 0 if its product
        is faster."""
        usage = self.usage[stored.names[0]]
        looked_up = usage.index if usage.kinds == {"embedding"} else None
        rows = usage.inputs // max(usage.calls, 1)
        key = (stored.kind, stored.shape, str(sorted(stored.settings.items())), rows if looked_up is None else tuple(looked_up.shape))
        if key not in self.known:
            form = KINDS[stored.kind].blank(stored.shape, stored.dtype, stored.settings)
            with torch.no_grad():
                if looked_up is not None:
                    found = timed(lambda: form.rows(looked_up), seconds=0.02, least=5).p50
                elif form.keeps_inputs:
                    found = timed(form.dense, seconds=0.02, least=5).p50
                else:
                    x, dense = torch.zeros(rows, stored.shape[1]), form.dense()
                    found = (timed(lambda: form.linear(x, None), 0.02, least=5).p50
                             - timed(lambda: functional.linear(x, dense), 0.02, least=5).p50)
            self.known[key] = found
        return self.known[key] * max(usage.calls, 1)   # not every use is seen: one of an LSTM is not


def clock_of(model: nn.Module, forward: Forward, sample: Batch, weights: Sequence[Weight]) -> Clock:
    with torch.no_grad(), looking_at(model, weights) as usage:
        forward(model, sample)
    return Clock(latency(model, forward, sample), usage)
