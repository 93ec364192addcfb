"""Measure inference latency, and predict how packed weights change it.

    latency = median of the original model + extra time of every packed weight * its uses per forward pass

Both terms are measured here, on one sample and without gradients. Higher percentiles are predicted from the measured
ratio of percentile to median.

On a busy machine, the kernel's scheduler tells which calls had to wait for a core (`measure/load.py`). Only calls that
did not wait are counted; if there are too few, the fastest quarter, with their waiting time subtracted. Models that are
compared are called alternately.

The samples of a model with exits take different times. Its latency is that of the mixture: of every exit the times of a
sample that leaves there, weighted by the share of samples that do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from math import ceil, prod
from statistics import fmean, quantiles
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shoestring.compression.calibration.fidelity import Forward
from shoestring.compression.calibration.probe import first_samples
from shoestring.compression.calibration.scratch import trim
from shoestring.compression.calibration.weight_usage import Usage, Weight, record_usage
from shoestring.compression.formats.format import WeightFormat
from shoestring.compression.formats.kinds import KINDS
from shoestring.compression.formats.manifest import Stored
from shoestring.core.batch import Batch
from shoestring.measure.load import HELD_UP, Effort, Timing, effort, timing

WARM, LEAST, MOST = 3, 20, 200  # warm-up calls; fewest and most timed calls
ENOUGH = 1.0  # seconds of timed calls of a model
TRIED = 0.03  # seconds of timed calls of a single weight
CACHED = 64 << 20  # bytes that a CPU cache may hold
PATIENCE = 4  # time limit is extended by this factor while calls have to wait for a core
TICK = 0.004  # seconds between the kernel's updates of a thread's run time: shorter calls may seem to have run for 0
BUSY = 0.05  # fraction of calls that may have waited before the user is warned


@dataclass(frozen=True)
class Latency:
    p50: float
    p99: float
    calls: int
    busy: float = 0.0  # fraction of its calls that had to wait for a core
    marks: tuple[float, ...] = field(default=(), repr=False)  # the 1st to the 99th percentile

    def at(self, percentile: float) -> float:
        """The seconds that this share of the answers keep.

        >>> Latency(1.0, 3.0, 20).at(0.5), Latency(1.0, 3.0, 20, marks=tuple(n / 50 for n in range(1, 100))).at(0.9)
        (1.0, 1.8)
        """
        if not self.marks:
            return self.p99 if percentile > 0.5 else self.p50
        return self.marks[min(max(ceil(100 * percentile - 1e-9), 1), 99) - 1]

    @property
    def mean(self) -> float:
        return fmean(self.marks or (self.p50,))

    def times(self, factor: float) -> Latency:
        return Latency(
            factor * self.p50, factor * self.p99, self.calls, self.busy, tuple(factor * one for one in self.marks)
        )

    @property
    def is_estimate(self) -> bool:
        """Whether too few calls ran undisturbed, so that waiting times were subtracted."""
        return self.calls < LEAST

    @property
    def warning(self) -> str:
        """Warning that the machine was busy; empty on a quiet one."""
        if self.busy <= BUSY:
            return ""
        told = "times are estimates without the waiting" if self.is_estimate else "only the others were counted"
        return f"the machine was busy: {self.busy:.0%} of the timed calls had to wait for a core, and {told}"


def mixed_latency(parts: Sequence[tuple[float, Latency]]) -> Latency:
    """The latency of answers of several kinds, each with its share.

    >>> easy, hard = (Latency(one, one, 20, marks=(one,) * 99) for one in (1.0, 5.0))
    >>> found = mixed_latency([(0.875, easy), (0.125, hard)])
    >>> found.p50, found.at(0.8), found.p99, round(found.mean, 2)
    (1.0, 1.0, 5.0, 1.48)
    """
    if len(parts) == 1:
        return parts[0][1]
    seconds = sorted((mark, share) for share, one in parts for mark in one.marks or (one.p50,) * 99)
    marks: list[float] = []
    whole, passed = sum(share for _, share in seconds), 0.0
    for mark, share in seconds:
        passed += share
        while len(marks) < 99 and passed >= (len(marks) + 1) / 100 * whole * (1 - 1e-9):
            marks.append(mark)
    calls, busy = sum(one.calls for _, one in parts), max(one.busy for _, one in parts)
    return Latency(marks[49], marks[98], calls, busy, tuple(marks))


def latency(model: nn.Module, forward: Forward, sample: Batch, seconds: float | None = None) -> Latency:
    """Latency of the model for one sample."""
    return latencies([model], forward, sample, seconds)[0]


def latencies(
    models: Sequence[nn.Module], forward: Forward, sample: Batch, seconds: float | None = None
) -> list[Latency]:
    """Latencies of several models for one sample, called alternately so that all meet the same load on the machine."""
    with torch.no_grad():
        return time_interleaved([partial(forward, model, sample) for model in models], seconds)


def time_interleaved(
    calls: Sequence[Callable[[], Any]],
    seconds: float | None = None,
    clock: Callable[[], float] | None = None,
    work: Callable[[], Effort] | None = None,
) -> list[Latency]:
    """Time several calls alternately: each for this many seconds, and up to four times as long while calls have to
    wait."""
    clock, work, seconds = clock or perf_counter, work or effort, ENOUGH if seconds is None else seconds
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


def undisturbed_seconds(timings: Sequence[Timing]) -> list[float]:
    return [one.seconds for one in timings if one.waited <= HELD_UP * one.seconds]


def least_disturbed_seconds(timings: Sequence[Timing]) -> list[float]:
    """Seconds of the fastest quarter of calls, with waiting time subtracted."""
    alone = sorted(one._replace(ran=max(one.ran, TICK)).alone for one in timings)
    return alone[: max(len(alone) // 4, 2)]


def long_enough(timings: Sequence[Timing], seconds: float) -> bool:
    spent, quiet = sum(one.seconds for one in timings), undisturbed_seconds(timings)
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
    quiet = undisturbed_seconds(timings)
    counted = quiet if len(quiet) >= LEAST else least_disturbed_seconds(timings)
    marks = quantiles(counted, n=100, method="inclusive")
    return Latency(marks[49], marks[98], len(quiet), 1 - len(quiet) / len(timings), tuple(marks))


def time_call(call: Callable[[], Any], seconds: float, least: int = 0) -> Latency:
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
    """A batch of one sample; the whole batch if it can't be split."""
    return first_samples(batch, 1)


@dataclass
class LatencyTimer:
    """Predicts a model's latency with packed weights, from measured times of each weight format."""

    plain: Latency  # of the original model
    usage: Mapping[str, Usage]  # of weights, in one forward pass
    bytes: int  # of all weights
    known: dict[tuple[Any, ...], float] = field(default_factory=dict)  # measured extra seconds, by format and shape

    @property
    def median(self) -> float:
        return self.plain.p50

    def tail(self, percentile: float) -> float:
        """Ratio of that percentile to the median."""
        return max(self.plain.at(percentile) / self.plain.p50, 1.0)

    def decoding(self, stored: Stored) -> float:
        """Extra seconds per forward pass with a weight in this format, which is decoded at every use; negative if its
        matrix product is faster."""
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
                self.known[key] = self.extra_seconds(stored, usage.kinds, rows, looked_up)
            trim()
        return self.known[key] * max(usage.calls, 1)  # some uses are not recorded, such as those in an LSTM

    def extra_seconds(self, stored: Stored, kinds: set[str], rows: int, looked_up: Tensor | None) -> float:
        """Measure the extra seconds of one use.

        A model uses all its other weights before it uses the same one again, so it is rarely in the CPU cache. To
        imitate that, calls alternate between copies, of half the model's bytes at most: the search should not take much
        more memory than the model. A freshly decoded weight is in the cache, which speeds up its
        product.
        """

        def blank() -> WeightFormat:
            return KINDS[stored.kind].blank(stored.shape, stored.dtype, stored.settings)

        if looked_up is not None:
            form = blank()
            return time_call(lambda: form.rows(looked_up), TRIED, least=5).p50
        size = prod(stored.shape) * stored.dtype.itemsize
        copies = [blank() for _ in range(min(max(1, -(-min(self.bytes // 2, CACHED) // max(size, 1))), MOST))]
        if kinds != {"linear"} or len(stored.shape) != 2:
            return median_of_cycle([one.dense for one in copies])
        x = torch.ones(max(rows, 1), stored.shape[1], dtype=stored.dtype)
        count, packed = len(copies), median_of_cycle([partial(one.linear, x, None) for one in copies])
        del copies  # before as many dense ones are made
        return packed - median_of_cycle(
            [partial(functional.linear, x, torch.ones(stored.shape, dtype=stored.dtype)) for _ in range(count)]
        )


def median_of_cycle(calls: Sequence[Callable[[], Any]]) -> float:
    """Median seconds of calls that are made in turn: the same operation on different memory."""
    order = cycle(calls)

    def one() -> Any:
        return next(order)()

    return time_call(one, TRIED, least=max(5, min(len(calls), 50))).p50


def latency_timer(
    model: nn.Module, forward: Forward, sample: Batch, weights: Sequence[Weight], known: Latency | None = None
) -> LatencyTimer:
    """`known`: the model's latency, where it is predicted from its parts."""
    with torch.no_grad(), record_usage(model, weights) as usage:
        forward(model, sample)
    plain = latency(model, forward, sample) if known is None else known
    return LatencyTimer(plain, usage, sum(weight.count * weight.dtype.itemsize for weight in weights))
