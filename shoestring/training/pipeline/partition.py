"""Where to cut a chain of blocks into stages: by hand, by parameters, by time, or by an exact program for given links
and memory.

A pipeline is as fast as its slowest stage. Per micro-batch, a stage i..j on r workers (*copies* of the stage, which
take turns) needs:

    work     sum_{k=i..j} forward_k + backward_k
    cuts     seconds of what crosses the cut before i, and the one after j
    sum      seconds of all-reducing the stage's gradients between its copies, once per batch of M micro-batches: 2 (r - 1)/r weights
    time     max(work / r + sum / M, cuts / r)                if links carry while workers compute: then they form a pipeline too
             (work + what the stage itself sends) / r + sum / M       if links take the workers' time
    memory   weights x per_weight + kept x ceil(held / r)     held: micro-batches in the stage at once; in 1F1B with S stages
                                                              at most S - s in stage s, so the first stages need most
             PipeDream stashes weights with every micro-batch but the newest: + weights x (ceil(held / r) - 1)

We want the cut (with copies) whose slowest stage is fastest while no stage needs more memory than a device has. For a
time T, let fewest(d, i) be the smallest number of workers with which blocks i.. run in d stages that all take T or
less:

    fewest(d, i) = min_j  copies(i, j, d, T) + fewest(d - 1, j)         copies: the least that make i..j-1 fast and small enough

The least T with fewest(S, 0) <= workers is one of finitely many possible stage times, so bisection over them finds it
exactly.
This is the program of Narayanan, Harlap, Phanishayee et al., PipeDream: Generalized Pipeline Parallelism for DNN
Training, SOSP 2019, arXiv 1806.03377 (section 3.1, on one level of machines), solved from the other end because the
memory of a stage depends on the stages after it; its formula is the first of the two times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate
from math import ceil, inf
from typing import Any

import numpy as np

from shoestring.core.errors import Mistake
from shoestring.core.ledger_parts import Workers
from shoestring.core.units import bytes_text

Table = np.ndarray[Any, Any]
NEVER = 1 << 20  # more workers than there are


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
    copies: tuple[int, ...]  # workers of every stage
    seconds: float  # of the slowest stage, per micro-batch
    memory: tuple[float, ...]  # bytes that every stage needs on each of its devices


class NothingFits(Mistake):
    """No cut fits; with `least` bytes a device there would be one."""

    def __init__(self, text: str, least: float) -> None:
        super().__init__(text)
        self.least = least


def one_forward_one_backward(pieces: int) -> Callable[[int], int]:
    """Micro-batches that 1F1B holds in a stage, by the number of stages from it to the last."""
    return lambda to_come: min(pieces, to_come)


def all_forward_first(pieces: int) -> Callable[[int], int]:
    """Micro-batches that GPipe holds: all of them, in every stage."""
    return lambda to_come: pieces


def by_hand(count: int, balance: Sequence[int]) -> tuple[int, ...]:
    """`balance` as the number of blocks in every stage; refused unless it places all blocks.

    >>> by_hand(8, [3, 5])
    (3, 5)
    """
    found = tuple(balance)
    if any(size < 1 for size in found) or not found:
        raise Mistake(
            f"balance={list(found)}: a stage needs one block or more; give numbers above zero that add up to {count}"
        )
    if sum(found) != count:
        raise Mistake(
            f"balance={list(found)} places {sum(found)} blocks, and the model has {count}: give numbers that add up to {count}"
        )
    return found


def by_parameters(chain: Sequence[BlockCost], stages: int) -> tuple[int, ...]:
    """The cut whose largest stage has the fewest bytes of weights."""
    return smallest_maximum([layer.weights for layer in chain], stages)


def by_time(chain: Sequence[BlockCost], stages: int) -> tuple[int, ...]:
    """The cut whose slowest stage computes for the shortest time."""
    return smallest_maximum([layer.seconds for layer in chain], stages)


def smallest_maximum(values: Sequence[float], stages: int) -> tuple[int, ...]:
    """How many consecutive values each part gets so that the largest sum of a part is smallest.

    >>> smallest_maximum([1, 1, 1, 1, 4], 2), smallest_maximum([5, 1, 1, 1], 3)
    ((4, 1), (1, 1, 2))
    """
    return best_cut([BlockCost("", forward=value) for value in values], Workers(world=stages), stages).blocks


def best_cut(
    chain: Sequence[BlockCost],
    workers: Workers,
    stages: int = 0,
    *,
    copied: bool = False,
    pieces: int = 1,
    holding: Holding | None = None,
) -> StageCut:
    """The cut whose slowest stage is fastest, among those that fit in memory and use at most `workers.world` devices.

    With 0 stages their number is free; if `copied`, a stage may be on several workers. `pieces` micro-batches make a
    batch, after which copies all-reduce their gradients.

    >>> best_cut([BlockCost("", forward=seconds) for seconds in (9, 1, 2, 3)], Workers(world=2), 2).blocks
    (1, 3)
    """
    count, world = len(chain), workers.world
    if stages > min(count, world) or count < 1 or world < 1 or stages < 0:
        raise Mistake(
            f"{stages} stages for {count} blocks on {world} workers: a stage needs a block and a worker of its own; "
            f"ask for {max(min(count, world), 1)} stages or fewer"
        )
    search = PartitionSearch(chain, workers, stages, copied, pieces, holding or Holding())
    if not search.fits(inf, search.holding.memory):
        least = search.least_memory()
        how = f"{stages} stages" if stages else f"{world} workers"
        raise NothingFits(
            f"no cut of {count} blocks over {how} fits {bytes_text(search.holding.memory)} a device: the best of them needs "
            f"{bytes_text(least)}; give that much, more stages, or more and smaller pieces",
            least,
        )
    return search.found(smallest(search.possible_times(), lambda time: search.fits(time, search.holding.memory)))


def least_demanding(chain: Sequence[BlockCost], workers: Workers, stages: int, holding: Holding) -> StageCut:
    """The cut whose largest stage needs the least memory, and of those the fastest."""
    least = PartitionSearch(chain, replace(workers, world=stages), stages, False, 1, holding).least_memory()
    return best_cut(chain, replace(workers, world=stages), stages, holding=replace(holding, memory=least))


def smallest(candidates: Table, enough: Callable[[float], bool]) -> float:
    """The smallest candidate that is enough, where every larger one is enough too (bisection)."""
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        if enough(float(candidates[middle])):
            high = middle
        else:
            low = middle + 1
    return float(candidates[low])


class PartitionSearch:
    """The tables for one chain: index [i, j] is the stage of blocks i..j-1, index [i, j, r - 1] that stage on r
    workers."""

    def __init__(
        self, chain: Sequence[BlockCost], workers: Workers, stages: int, copied: bool, pieces: int, holding: Holding
    ) -> None:
        self.count, self.workers, self.stages, self.holding = len(chain), workers, stages, holding
        self.most = stages or min(workers.world, self.count)  # largest number of stages
        self.copies = np.arange(1, (workers.world if copied else 1) + 1, dtype=np.int32)  # possible copies of a stage
        weights = spans([layer.weights for layer in chain])
        factor = holding.per_weight - 1 if holding.stashed else holding.per_weight
        self.fixed = weights * factor  # bytes; and bytes per micro-batch that is held
        self.per_piece = spans([layer.kept for layer in chain]) + (weights if holding.stashed else 0.0)
        self.held = [max(holding.held(to_come), 1) for to_come in range(1, self.most + 1)]
        begins, ends = np.indices(weights.shape)
        self.real: Table = np.asarray(begins < ends)
        self.times = self.timed(chain, weights, pieces)

    def timed(self, chain: Sequence[BlockCost], weights: Table, pieces: int) -> Table:
        seconds, r = self.workers.seconds, self.copies
        work = spans([layer.seconds for layer in chain])
        back = np.array([0.0, *(seconds(layer.returning, 1) for layer in chain[1:]), 0.0])  # over each cut
        forth = np.array([0.0, *(seconds(layer.crossing, 1) for layer in chain[1:]), 0.0])
        each = (
            weights[..., None] * self.workers.per_byte_sent / r + self.workers.per_message
        )  # of the all-reduce's 2 (r - 1) messages
        adding = 2 * (r - 1) * each / max(pieces, 1)
        if self.workers.hides:
            cuts = np.maximum.outer(back + forth, back + forth)
            return np.asarray(np.maximum(work[..., None] / r + adding, cuts[..., None] / r))
        return np.asarray((work + back[:, None] + forth[None, :])[..., None] / r + adding)

    def possible_times(self) -> Table:
        return np.unique(self.times[self.real])

    def possible_needs(self) -> Table:
        shares = {ceil(held / r) for held in self.held for r in self.copies.tolist()}
        return np.unique([self.fixed[self.real] + self.per_piece[self.real] * share for share in shares])

    def least_memory(self) -> float:
        return smallest(self.possible_needs(), lambda memory: self.fits(inf, memory))

    def fits(self, time: float, memory: float) -> bool:
        tables = self.fewest(time, memory)
        return bool((tables[-1] if self.stages else np.array(tables))[..., 0].min() <= self.workers.world)

    def fewest(self, time: float, memory: float) -> list[Table]:
        """For d = 0, 1, ... stages and every i: the fewest workers with which blocks i.. fit in d stages."""
        tables = [np.full(self.count + 1, NEVER, dtype=np.int32)]
        tables[0][self.count] = 0
        enough = self.enough(time)
        copies = {held: self.needed(enough, held, memory) for held in set(self.held)}
        for held in self.held:
            tables.append(np.minimum((copies[held] + tables[-1]).min(-1), NEVER))
        return tables

    def enough(self, time: float) -> Table:
        """At [i, j, r - 1]: the fewest copies, r or more, with which the stage takes at most `time`. More copies are
        not always faster."""
        fast = np.where((self.times <= time) & self.real[..., None], self.copies, np.int32(NEVER))
        return np.minimum.accumulate(fast[..., ::-1], axis=-1)[..., ::-1]

    def needed(self, enough: Table, held: int, memory: float) -> Table:
        """The fewest copies of every stage that make it fast enough and fit in memory with `held` micro-batches in
        it."""
        reached, small = enough[..., 0], self.small(held, memory)
        if len(self.copies) > 1 and (small[self.real] > 1).any():
            reached = np.take_along_axis(enough, np.minimum(small, len(self.copies))[..., None] - 1, axis=-1)[..., 0]
        return np.where(small <= len(self.copies), reached, np.int32(NEVER))

    @cache  # noqa: B019 (a search lives as long as one call of best_cut)
    def small(self, held: int, memory: float) -> Table:
        """The fewest copies with which a stage fits, where the stage as a whole holds `held` micro-batches."""
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.floor((memory - self.fixed) / self.per_piece)  # micro-batches that a copy has room for,
        share = np.clip(np.nan_to_num(share, nan=held, posinf=held, neginf=0), 0, held)
        share -= self.fixed + self.per_piece * share > memory  # corrected for rounding
        share += (share < held) & (self.fixed + self.per_piece * (share + 1) <= memory)
        return np.where(share >= 1, np.ceil(held / np.maximum(share, 1)), NEVER).astype(np.int32)

    def found(self, time: float) -> StageCut:
        """The cut that reaches the least time."""
        tables = self.fewest(time, self.holding.memory)
        stages = self.stages or next(number for number, table in enumerate(tables) if table[0] <= self.workers.world)
        enough, begin = self.enough(time), 0
        blocks, copies, seconds, memory = [], [], [], []
        for to_come in range(stages, 0, -1):
            held = self.held[to_come - 1]
            needed = self.needed(enough, held, self.holding.memory)[begin]
            end = int((needed + tables[to_come - 1]).argmin())
            r = int(needed[end])
            blocks.append(end - begin)
            copies.append(r)
            seconds.append(float(self.times[begin, end, r - 1]))
            memory.append(float(self.fixed[begin, end] + self.per_piece[begin, end] * ceil(held / r)))
            begin = end
        return StageCut(tuple(blocks), tuple(copies), max(seconds), tuple(memory))


def spans(values: Sequence[float]) -> Table:
    """At [i, j]: the sum of the values i..j-1.

    >>> float(spans([1, 2, 4])[1, 3])
    6.0
    """
    sums = np.array([0.0, *accumulate(values)])
    return np.asarray(sums[None, :] - sums[:, None])
