"""The best lengths for slices of a sequence: TeraPipe's dynamic program, solved exactly.

A slice of l tokens after c earlier ones takes t(l, c) seconds in every stage of a pipeline: longer with more context.
All slices through S stages take

    T = sum_i t_i + (S - 1) max_i t_i        the last stage computes all slices, and waits for the longest in each stage before it

and B samples, one after the other, take B times the sum. For a limit on max t_i, a dynamic program over prefixes of the
sequence finds the smallest sum. The paper tries all limits, or some at distance eps. Here the limit falls from the
highest: the solution under a limit is the best one for all limits down to its own longest slice, so the next limit
worth trying is just below that. This visits the whole front of sum against maximum, so no eps is needed.

    t(l, c) = t(l, 0) + a0 + a1 l + a2 c + a3 l c     for c > 0: products of queries and earlier keys are l c of them

Li et al.: TeraPipe, 2021, arXiv 2102.07988: the objective and the program in section 3.3, the fit of t at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from shoestring.core.errors import Mistake
from shoestring.training.sequence.sliced_attention import spans_of

Seconds = Callable[[int, int], float]  # (tokens of a slice, tokens before it) -> seconds


@dataclass(frozen=True)
class SlicePlan:
    """A way to cut a sequence."""

    lengths: tuple[int, ...]
    seconds: float  # of all slices through all stages


def latency(lengths: tuple[int, ...], seconds: Seconds, stages: int, samples: int = 1) -> float:
    """Seconds that slices of these lengths, of every sample, take through a pipeline of `stages` stages.

    >>> latency((2, 2), lambda length, context: length + context / 2, 3)
    11.0
    """
    each = [seconds(span.length, span.start) for span in spans_of(lengths)]
    return samples * sum(each) + (stages - 1) * max(each)


def best_slices(seconds: Seconds, length: int, stages: int, granularity: int = 8, samples: int = 1) -> SlicePlan:
    """The slices of a sequence that take least time through a pipeline; they end at multiples of `granularity` tokens.
    `samples` sequences of that length follow each other, in the same slices."""
    if min(length, stages, granularity, samples) < 1:
        raise Mistake(
            f"slices of {samples} x {length} tokens for {stages} stages, {granularity} at a time: give 1 or more of each"
        )
    ends = [*range(0, length, granularity), length]
    times = np.full((len(ends), len(ends)), np.inf)  # of the slice between two ends
    for first, start in enumerate(ends):
        times[first, first + 1 :] = [seconds(stop - start, start) for stop in ends[first + 1 :]]
    if not np.isfinite(times[np.triu_indices(len(ends), 1)]).all() or (times < 0).any():
        raise Mistake("slices can't be chosen: the time of a slice must be a number, 0 or more")
    best: SlicePlan | None = None
    for cuts, total, longest in front(times):
        if best is not None and samples * total >= best.seconds:  # under a lower limit, the sum is no smaller
            break
        found = samples * total + (stages - 1) * longest
        if best is None or found < best.seconds:
            best = SlicePlan(tuple(ends[b] - ends[a] for a, b in pairwise(cuts)), found)
    assert best is not None, "one slice is always possible"
    return best


def front(times: np.ndarray) -> Iterator[tuple[list[int], float, float]]:
    """Cuts with the sum and maximum of their slices' times: the smallest sum under ever lower limits on the maximum."""
    limit = np.inf
    while True:
        found = least_sum(np.where(times < limit, times, np.inf))
        if found is None:
            return
        cuts, total = found
        limit = max(float(times[a, b]) for a, b in pairwise(cuts))
        yield cuts, total, limit


def least_sum(times: np.ndarray) -> tuple[list[int], float] | None:
    """The cuts with the smallest sum of times; None if some part can't be covered."""
    count = len(times)
    least, before = np.full(count, np.inf), np.zeros(count, dtype=int)
    least[0] = 0.0
    for end in range(1, count):
        sums = least[:end] + times[:end, end]
        before[end] = int(sums.argmin())
        least[end] = sums[before[end]]
    if not np.isfinite(least[-1]):
        return None
    cuts = [count - 1]
    while cuts[-1]:
        cuts.append(int(before[cuts[-1]]))
    return cuts[::-1], float(least[-1])


@dataclass(frozen=True)
class FittedTimes:
    """t(length, context), fitted to a few measurements; a `Seconds`."""

    alone: tuple[
        tuple[int, float], ...
    ]  # (tokens, seconds) of slices without context, by rising tokens; linear in between
    context: tuple[float, float, float, float]  # a0 to a3, the cost of context

    def __call__(self, length: int, context: int) -> float:
        tokens, seconds = zip(*self.alone, strict=True)
        found = float(np.interp(length, tokens, seconds))
        if length > tokens[-1] and len(tokens) > 1:  # extrapolate the last line
            found += (length - tokens[-1]) * (seconds[-1] - seconds[-2]) / (tokens[-1] - tokens[-2])
        if length < tokens[0] and len(tokens) > 1:  # extrapolate the first line
            found -= (tokens[0] - length) * max(seconds[1] - seconds[0], 0.0) / (tokens[1] - tokens[0])
        if context:
            found += max(float(np.dot(self.context, (1.0, length, context, length * context))), 0.0)
        return max(found, 0.0)


def fit_times(measured: Mapping[tuple[int, int], float]) -> FittedTimes:
    """Fit t(length, context) to seconds by (length, context): some with context 0, and four or more with another."""
    alone = tuple(sorted((length, seconds) for (length, context), seconds in measured.items() if not context))
    pairs = [(length, context) for length, context in measured if context]
    if len(alone) < 2 or len(pairs) < 4:
        raise Mistake(
            f"t(length, context) can't be fitted to {len(alone)} measurements without context and {len(pairs)} with one: two and "
            "four are needed"
        )
    bare = FittedTimes(alone, (0.0, 0.0, 0.0, 0.0))
    rows = np.array([(1.0, length, context, length * context) for length, context in pairs])
    added = np.array([measured[pair] - bare(*pair) for pair in pairs])
    scale = np.abs(rows).max(axis=0)  # unscaled, the system is badly conditioned
    found = np.linalg.lstsq(rows / scale, added, rcond=None)[0] / scale
    return FittedTimes(alone, (float(found[0]), float(found[1]), float(found[2]), float(found[3])))
