"""Where to cut a chain of blocks into stages: so that the slowest stage is fastest, or the largest smallest.

A pipeline is as fast as its slowest stage. Per micro-batch, a stage i..j needs:

    work     sum_{k=i..j} forward_k + backward_k
    cuts     seconds of what crosses the cut before i, and the one after j
    time     max(work, cuts)                         if links carry while workers compute
             work + what the stage itself sends      if links take the workers' time
    memory   weights x per_weight + kept x held      held: micro-batches in the stage at once; in 1F1B with S stages
                                                     at most S - s in stage s, so the first stages need most
             PipeDream stashes weights with every micro-batch but the newest: + weights x (held - 1)

We want the cut whose largest value (time, or memory) is smallest. With d stages for the blocks i..:

    least(d, i) = min_j  max(value(i, j, d), least(d - 1, j))          d: the number of stages from this one to the last

This is the program of Narayanan, Harlap, Phanishayee et al., PipeDream: Generalized Pipeline Parallelism for DNN
Training, SOSP 2019, arXiv 1806.03377 (section 3.1, on one level of machines and without copies of stages), solved from
the other end because the memory of a stage depends on the stages after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import inf
from typing import Any

import numpy as np

from shoestring.core.costs.ledger_parts import Workers
from shoestring.core.errors import Mistake
from shoestring.core.units import bytes_text

Table = np.ndarray[Any, Any]


@dataclass(frozen=True)
class BlockCost:
    """One block of the chain: its cost for one micro-batch."""

    name: str
    forward: float = 0.0  # seconds
    backward: float = 0.0  # seconds
    weights: float = 0.0  # bytes
    kept: float = 0.0  # bytes kept from its forward to its backward
    crossing: float = 0.0  # bytes that a cut right before it sends forward
    returning: float = 0.0  # bytes of gradients that come back over that cut

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Holding:
    """The memory a stage needs on a device, and the limit."""

    memory: float = inf  # bytes of a device
    per_weight: float = 1.0  # bytes per byte of weights: 1 plus gradients and optimizer state
    held: Callable[[int], int] = field(
        default=lambda to_come: 1
    )  # micro-batches in a stage at once, by S - s: the number of stages from it to the last
    stashed: bool = False  # whether every micro-batch but the newest keeps the weights that it began with


@dataclass(frozen=True)
class StageCut:
    blocks: tuple[int, ...]  # of every stage
    seconds: float  # of the slowest stage, per micro-batch
    memory: tuple[float, ...]  # bytes that every stage needs


class NothingFits(Mistake):
    """No cut fits; with `least` bytes a device there would be one."""

    def __init__(self, text: str, least: float) -> None:
        super().__init__(text)
        self.least = least


def smallest_maximum(values: Sequence[float], stages: int) -> tuple[int, ...]:
    """How many consecutive values each part gets so that the largest sum of a part is smallest.

    >>> smallest_maximum([1, 1, 1, 1, 4], 2), smallest_maximum([5, 1, 1, 1], 3)
    ((4, 1), (1, 1, 2))
    """
    return best_cut([BlockCost("", forward=value) for value in values], Workers(), stages).blocks


def best_cut(chain: Sequence[BlockCost], workers: Workers, stages: int, *, holding: Holding | None = None) -> StageCut:
    """The cut whose slowest stage is fastest, among those that fit in memory. `workers` have the links.

    >>> best_cut([BlockCost("", forward=seconds) for seconds in (9, 1, 2, 3)], Workers(), 2).blocks
    (1, 3)
    """
    count = len(chain)
    if not 1 <= stages <= count:
        raise Mistake(
            f"{stages} stages for {count} blocks: a stage needs a block of its own; ask for {max(count, 1)} stages or fewer"
        )
    holding = holding or Holding()
    search = PartitionSearch(chain, workers, stages, holding)
    if (seconds := search.least_seconds(holding.memory)) == inf:
        least = search.least_memory()
        raise NothingFits(
            f"no cut of {count} blocks over {stages} stages fits {bytes_text(holding.memory)} a device: the best of them needs "
            f"{bytes_text(least)}; give that much, more stages, or more and smaller pieces",
            least,
        )
    return search.first_cut(seconds, holding.memory)


def least_demanding(chain: Sequence[BlockCost], workers: Workers, stages: int, holding: Holding) -> StageCut:
    """The cut whose largest stage needs the least memory, and of those the fastest."""
    search = PartitionSearch(chain, workers, stages, holding)
    least = search.least_memory()
    return search.first_cut(search.least_seconds(least), least)


class PartitionSearch:
    """The tables for one chain: index [i, j] is the stage of blocks i..j-1; infinite where there is none."""

    def __init__(self, chain: Sequence[BlockCost], workers: Workers, stages: int, holding: Holding) -> None:
        self.count = len(chain)
        self.held = [max(holding.held(to_come), 1) for to_come in range(1, stages + 1)]  # of the last stage first
        weights, kept = spans([layer.weights for layer in chain]), spans([layer.kept for layer in chain])
        fixed = weights * (holding.per_weight - 1 if holding.stashed else holding.per_weight)
        each = kept + (weights if holding.stashed else 0.0)  # of a micro-batch
        begins, ends = np.indices(weights.shape)
        self.times = np.where(begins < ends, stage_times(chain, workers), inf)
        self.memories = {held: np.where(begins < ends, fixed + each * held, inf) for held in set(self.held)}

    def least_memory(self) -> float:
        """Of the largest stage."""
        return self.least(self.memories)

    def least_seconds(self, memory: float) -> float:
        """Of the slowest stage; infinite if no cut fits."""
        return self.least({held: np.where(need <= memory, self.times, inf) for held, need in self.memories.items()})

    def least(self, values: Mapping[int, Table]) -> float:
        """The least that a cut's largest value can be; `values` by the micro-batches that a stage holds."""
        best = np.full(self.count + 1, inf)
        best[self.count] = -inf
        for held in self.held:
            best = np.maximum(values[held], best).min(-1)
        return float(best[0])

    def first_cut(self, seconds: float, memory: float) -> StageCut:
        """The first cut of which every stage takes at most so much."""
        allowed = {held: (self.times <= seconds) & (need <= memory) for held, need in self.memories.items()}
        reached = [np.arange(self.count + 1) == self.count]  # at [d][i]: whether blocks i.. can be d stages
        for held in self.held:
            reached.append((allowed[held] & reached[-1]).any(-1))
        ends = [0]
        for held, after in zip(reversed(self.held), reversed(reached[:-1]), strict=True):
            ends.append(int((allowed[held][ends[-1]] & after).argmax()))
        stages = list(pairwise(ends))
        return StageCut(
            tuple(end - begin for begin, end in stages),
            max(float(self.times[stage]) for stage in stages),
            tuple(float(self.memories[held][stage]) for held, stage in zip(reversed(self.held), stages, strict=True)),
        )


def stage_times(chain: Sequence[BlockCost], workers: Workers) -> Table:
    """At [i, j]: seconds of the stage i..j-1 for one micro-batch."""
    work = spans([layer.seconds for layer in chain])
    back = np.array([0.0, *(workers.seconds(layer.returning, 1) for layer in chain[1:]), 0.0])  # over each cut
    forth = np.array([0.0, *(workers.seconds(layer.crossing, 1) for layer in chain[1:]), 0.0])
    if workers.hides:
        return np.asarray(np.maximum(work, np.maximum.outer(back + forth, back + forth)))
    return np.asarray(work + back[:, None] + forth[None, :])


def spans(values: Sequence[float]) -> Table:
    """At [i, j]: the sum of the values i..j-1.

    >>> float(spans([1, 2, 4])[1, 3])
    6.0
    """
    sums = np.array([0.0, *accumulate(values)])
    return np.asarray(sums[None, :] - sums[:, None])
