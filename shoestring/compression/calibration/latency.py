"""How long an answer takes, and how much longer with packed weights.

    latency = median of the plain model + what decoding each packed weight takes, as often as one answer uses it

Both are measured here, on one sample and without gradients. What a percentile is above the median is a share, measured too.

On a machine that others use, the kernel's scheduler says which calls had to wait for a core (`measure/load.py`). Those that did not are
counted; where too few did not, the fastest quarter, without the time that they waited. Models that are compared are called in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from math import prod
from statistics import quantiles
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shoestring.compression.calibration.fidelity import Forward
from shoestring.compression.calibration.weight_usage import Usage, Weight, looking_at
from shoestring.compression.formats.format import WeightFormat
from shoestring.compression.formats.kinds import KINDS
from shoestring.compression.formats.manifest import Stored
from shoestring.core.batch import Batch, samples, split
from shoestring.core.errors import Mistake
from shoestring.measure.load import HELD_UP, Effort, Timing, effort, timing

WARM, LEAST, MOST = 3, 20, 200  # calls: before anything is timed; that are timed at least; at most
ENOUGH = 1.0  # seconds of timed calls
TRIED = 0.03  # of those of a single weight
CACHED = 64 << 20  # bytes that a processor's cache may hold
PATIENCE = 4  # times as long, while calls have to wait for a core
TICK = 0.004  # seconds after which the kernel counts what a thread ran: a shorter call may seem to have run for 0
BUSY = 0.05  # share of calls that wait on a machine of which nobody is told that it is busy


@dataclass(frozen=True)
class Latency:
    p50: float
    p99: float
    calls: int
    busy: float = 0.0  # share of its calls that had to wait for a core

    @property
    def is_estimate(self) -> bool:
        """Whether too few calls ran undisturbed, so that waiting was taken off by arithmetic."""
        return self.calls < LEAST

    @property
    def warning(self) -> str:
        """Why not to trust it fully; empty on a quiet machine."""
        if self.busy <= BUSY:
            return ""
        told = "times are estimates without the waiting" if self.is_estimate else "only the others were counted"
        return f"the machine was busy: {self.busy:.0%} of the calls that were timed had to wait for a core, and {told}"


def latency(model: nn.Module, forward: Forward, sample: Batch, seconds: float | None = None) -> Latency:
    """Of answers to one sample."""
    return latencies([model], forward, sample, seconds)[0]


def latencies(
    models: Sequence[nn.Module], forward: Forward, sample: Batch, seconds: float | None = None
) -> list[Latency]:
    """Of answers of several models to one sample, in turns, so that all of them meet the same machine."""
    with torch.no_grad():
        return timed_in_turns(
            [partial(forward, model, sample) for model in models], ENOUGH if seconds is None else seconds
        )


def timed_in_turns(
    calls: Sequence[Callable[[], Any]],
    seconds: float,
    clock: Callable[[], float] = perf_counter,
    work: Callable[[], Effort] = effort,
) -> list[Latency]:
    """Latencies of calls that take turns: for so many seconds each, and up to four times as long while calls have to wait."""
    for call in calls:
        for _ in range(WARM):
            call()
    taken: list[list[Timing]] = [[] for _ in calls]
    while not all(long_enough(one, seconds) for one in taken):
        for call, mine in zip(calls, taken, strict=True):
            before, begin = work(), clock()
            call()
            mine.append(timing(clock() - begin, before, work()))
    return [latency_of(one) for one in taken]


def undisturbed(timings: Sequence[Timing]) -> list[float]:
    return [one.seconds for one in timings if one.waited <= HELD_UP * one.seconds]


def least_disturbed(timings: Sequence[Timing]) -> list[float]:
    """Seconds of the fastest quarter of calls, without the waiting."""
    alone = sorted(one._replace(ran=max(one.ran, TICK)).alone for one in timings)
    return alone[: max(len(alone) // 4, 2)]


def long_enough(timings: Sequence[Timing], seconds: float) -> bool:
    spent, quiet = sum(one.seconds for one in timings), undisturbed(timings)
    if len(timings) < LEAST:
        return False
    patience = 1 if len(quiet) >= LEAST else PATIENCE
    return spent >= patience * seconds or len(timings) >= patience * MOST


def latency_of(timings: Sequence[Timing]) -> Latency:
    """
    >>> quiet, waited = Timing(0.125, 0.125), Timing(4.0, ran=0.125, waited=3.875)
    >>> latency_of([quiet] * 20 + [waited] * 60)
    Latency(p50=0.125, p99=0.125, calls=20, busy=0.75)
    >>> latency_of([waited] * 30)
    Latency(p50=0.125, p99=0.125, calls=0, busy=1.0)
    """
    quiet = undisturbed(timings)
    counted = quiet if len(quiet) >= LEAST else least_disturbed(timings)
    marks = quantiles(counted, n=100, method="inclusive")
    return Latency(marks[49], marks[98], len(quiet), 1 - len(quiet) / len(timings))


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
class LatencyTimer:
    """Latencies of a model's answers, with weights packed one way or another."""

    plain: Latency
    usage: Mapping[str, Usage]  # of weights, in one answer
    bytes: int  # of all weights
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
        key = (
            stored.kind,
            stored.shape,
            str(sorted(stored.settings.items())),
            rows if looked_up is None else tuple(looked_up.shape),
        )
        if key not in self.known:
            with torch.no_grad():
                self.known[key] = self.extra(stored, usage.kinds, rows, looked_up)
        return self.known[key] * max(usage.calls, 1)  # not every use is seen: one of an LSTM is not

    def extra(self, stored: Stored, kinds: set[str], rows: int, looked_up: Tensor | None) -> float:
        """Seconds of one use. A model goes through all its weights before it comes to the same one again, so it seldom finds it in the
        processor's cache: copies take turns here, too. What was just decoded is in the cache, which a product with it gains from."""

        def blank() -> WeightFormat:
            return KINDS[stored.kind].blank(stored.shape, stored.dtype, stored.settings)

        if looked_up is not None:
            form = blank()
            return timed(lambda: form.rows(looked_up), TRIED, least=5).p50
        size = prod(stored.shape) * stored.dtype.itemsize
        copies = [blank() for _ in range(min(max(1, -(-min(self.bytes, CACHED) // max(size, 1))), MOST))]
        if kinds != {"linear"} or len(stored.shape) != 2:
            return in_turns([one.dense for one in copies])
        x = torch.ones(max(rows, 1), stored.shape[1], dtype=stored.dtype)
        dense = [torch.ones(stored.shape, dtype=stored.dtype) for _ in copies]
        return in_turns([partial(one.linear, x, None) for one in copies]) - in_turns(
            [partial(functional.linear, x, one) for one in dense]
        )


def in_turns(calls: Sequence[Callable[[], Any]]) -> float:
    """Median seconds of calls that do the same with different numbers."""
    order = cycle(calls)

    def one() -> Any:
        return next(order)()

    return timed(one, TRIED, least=max(5, min(len(calls), 50))).p50


def clock_of(model: nn.Module, forward: Forward, sample: Batch, weights: Sequence[Weight]) -> LatencyTimer:
    with torch.no_grad(), looking_at(model, weights) as usage:
        forward(model, sample)
    return LatencyTimer(
        latency(model, forward, sample), usage, sum(weight.count * weight.dtype.itemsize for weight in weights)
    )
