"""Measure inference latency, and predict how packed weights change it.

    latency = median of the original model + extra time of every packed weight * its uses per forward pass

Both terms are measured here, on one sample and without gradients. Higher percentiles are predicted from the measured
ratio of percentile to median.

On a busy machine, the kernel's scheduler tells which calls had to wait for a core (`measure/load.py`). Only calls that
did not wait are counted; if there are too few, the fastest quarter, with their waiting time subtracted. Models that are
compared are called alternately.
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
FEWEST_PAIRS = 5  # least calls of a single weight, in turns with a plain one
NOTCH = 1.57  # of the interquartile range over the root of the number: about a 95 % interval of a median
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


def latency(model: nn.Module, forward: Forward, sample: Batch, seconds: float | None = None) -> Latency:
    """Latency of the model for one sample."""
    return latencies([model], forward, sample, seconds)[0]


def latencies(
    models: Sequence[nn.Module], forward: Forward, sample: Batch, seconds: float | None = None
) -> list[Latency]:
    """Latencies of several models for one sample, called alternately so that all meet the same load on the machine."""
    with torch.no_grad():
        return time_interleaved(
            [partial(forward, model, sample) for model in models], ENOUGH if seconds is None else seconds
        )


def time_interleaved(
    calls: Sequence[Callable[[], Any]],
    seconds: float,
    clock: Callable[[], float] = perf_counter,
    work: Callable[[], Effort] = effort,
) -> list[Latency]:
    """Latencies of several calls, made alternately."""
    return [latency_of(one) for one in timings_in_turns(calls, seconds, LEAST, clock, work)]


def timings_in_turns(
    calls: Sequence[Callable[[], Any]],
    seconds: float,
    least: int,
    clock: Callable[[], float] = perf_counter,
    work: Callable[[], Effort] = effort,
) -> list[list[Timing]]:
    """Time several calls alternately: each for this many seconds and so often at least, and up to four times as long
    while calls have to wait."""
    for call in calls:
        for _ in range(WARM):
            call()
    taken: list[list[Timing]] = [[] for _ in calls]
    while not all(long_enough(one, seconds, least) for one in taken):
        for call, mine in zip(calls, taken, strict=True):
            before, begin = work(), clock()
            call()
            mine.append(timing(clock() - begin, before, work()))
    return taken


def difference_of(some: Sequence[Timing], others: Sequence[Timing]) -> float:
    """Seconds by which a call takes longer than the one made in turns with it: the median over pairs that did not wait
    for a core, and 0 if it is within the notch of a box plot (McGill, Tukey, Larsen 1978, doi
    10.1080/00031305.1978.10479236), which is noise. Without such pairs, waiting is subtracted. A call saves at most all
    of the other one.

    >>> times = [Timing(one, one) for one in (1.0, 2.0, 1.0, 2.0)]
    >>> difference_of(times, [Timing(0.5, 0.5)] * 4), difference_of(times, [Timing(1.5, 1.5)] * 4)
    (1.0, 0.0)
    """
    pairs = list(zip(some, others, strict=True))
    quiet = [pair for pair in pairs if len(undisturbed_seconds(pair)) == 2]
    counted = [(one.alone, other.alone) for one, other in (quiet if len(quiet) >= FEWEST_PAIRS else pairs)]
    low, middle, high = quantiles([one - other for one, other in counted], n=4, method="inclusive")
    if abs(middle) <= NOTCH * (high - low) / len(counted) ** 0.5:
        return 0.0
    return max(middle, -quantiles([other for _, other in counted], n=2, method="inclusive")[0])


def undisturbed_seconds(timings: Sequence[Timing]) -> list[float]:
    return [one.seconds for one in timings if one.waited <= HELD_UP * one.seconds]


def least_disturbed_seconds(timings: Sequence[Timing]) -> list[float]:
    """Seconds of the fastest quarter of calls, with waiting time subtracted."""
    alone = sorted(one._replace(ran=max(one.ran, TICK)).alone for one in timings)
    return alone[: max(len(alone) // 4, 2)]


def long_enough(timings: Sequence[Timing], seconds: float, least: int = LEAST) -> bool:
    spent, quiet = sum(one.seconds for one in timings), undisturbed_seconds(timings)
    if len(timings) < least:
        return False
    patience = 1 if len(quiet) >= least else PATIENCE
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
    return Latency(marks[49], marks[98], len(quiet), 1 - len(quiet) / len(timings))


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
        return 1.0 if percentile <= 0.5 else max(self.plain.p99 / self.plain.p50, 1.0)

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
        imitate that, calls alternate between copies, of half the model's bytes at most together with plain ones: the
        search should not take much more memory than the model. A freshly decoded weight is in the cache, which speeds up its
        product.
        """

        def blank() -> WeightFormat:
            return KINDS[stored.kind].blank(stored.shape, stored.dtype, stored.settings)

        if looked_up is not None:
            form = blank()
            return extra_in_turns([lambda: form.rows(looked_up)])
        size = prod(stored.shape) * stored.dtype.itemsize
        copies = [blank() for _ in range(min(max(1, -(-min(self.bytes // 4, CACHED) // max(size, 1))), MOST))]
        if kinds != {"linear"} or len(stored.shape) != 2:
            return extra_in_turns([one.dense for one in copies])
        x = torch.ones(max(rows, 1), stored.shape[1], dtype=stored.dtype)
        plain = [torch.ones(stored.shape, dtype=stored.dtype) for _ in copies]
        return extra_in_turns(
            [partial(one.linear, x, None) for one in copies], [partial(functional.linear, x, one) for one in plain]
        )


def extra_in_turns(packed: Sequence[Callable[[], Any]], plain: Sequence[Callable[[], Any]] = ()) -> float:
    """Extra seconds of a packed operation beside the plain one, or beside nothing. Calls are made in turn, on different
    memory."""
    least = max(FEWEST_PAIRS, min(len(packed), 50))
    return difference_of(*timings_in_turns([taking_turns(packed), taking_turns(plain)], TRIED, least))


def taking_turns(calls: Sequence[Callable[[], Any]]) -> Callable[[], None]:
    """A function that makes the next call at every use; without calls, it does nothing."""
    order = cycle(calls)

    def one() -> None:
        if calls:
            next(order)()

    return one


def latency_timer(model: nn.Module, forward: Forward, sample: Batch, weights: Sequence[Weight]) -> LatencyTimer:
    with torch.no_grad(), record_usage(model, weights) as usage:
        forward(model, sample)
    return LatencyTimer(
        latency(model, forward, sample), usage, sum(weight.count * weight.dtype.itemsize for weight in weights)
    )
