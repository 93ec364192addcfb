"""Samplers: which samples of a map-style Dataset make a batch.

    Shuffled()          every sample once per epoch, in an order determined by the seed; an incomplete last batch is left out
    Poisson(rate)       each sample independently with probability `rate`; a batch has rate x count samples on average
    Subset(indices)     another sampler's batches, from these samples only
    InOrder()           every sample once per epoch, in the data's order; the last batch may be smaller

Every batch is determined by the seed and its number, so a run can resume at any position with the same batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count as numbers

import torch

from shoestring.core.errors import Mistake
from shoestring.core.job import Sampler


@dataclass(frozen=True)
class Shuffled:
    fills_batches = True

    def refusal(self, count: int, size: int) -> str:
        return (
            f"a data set of {count} samples for batches of {size}: give more data or a smaller batch"
            if count < size
            else ""
        )

    def per_epoch(self, count: int, size: int) -> int:
        return count // size

    def batches(self, count: int, size: int, seed: int, begin: int) -> Iterator[list[int]]:
        order = torch.Generator().manual_seed(seed)
        while True:
            shuffled = torch.randperm(count, generator=order).tolist()
            starts = range(0, count - size + 1, size)
            yield from (shuffled[start : start + size] for start in starts[begin:])
            begin = max(begin - len(starts), 0)


@dataclass(frozen=True)
class InOrder:
    """The sampler for held-out data."""

    fills_batches = False

    def refusal(self, count: int, size: int) -> str:
        return "" if count else "a data set without samples: give some"

    def per_epoch(self, count: int, size: int) -> int:
        return -(-count // size)

    def batches(self, count: int, size: int, seed: int, begin: int) -> Iterator[list[int]]:
        rounds = self.per_epoch(count, size)
        for number in numbers(begin):
            start = number % rounds * size
            yield list(range(start, min(start + size, count)))


@dataclass(frozen=True)
class Poisson:
    """The sampling that privacy accounting assumes (Abadi et al.: Deep Learning with Differential Privacy, 2016, arXiv
    1607.00133).

    An empty batch is drawn again, which is the same as leaving empty batches out.
    """

    rate: float  # probability that a sample is in a batch
    fills_batches = False

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise Mistake(
                f"Poisson(rate={self.rate}): the probability of a sample to be in a batch is above 0 and at most 1"
            )

    def refusal(self, count: int, size: int) -> str:
        return "" if count else "a data set without samples: give some"

    def per_epoch(self, count: int, size: int) -> int:
        return max(round(1 / self.rate), 1)

    def batches(self, count: int, size: int, seed: int, begin: int) -> Iterator[list[int]]:
        for number in numbers(begin):
            draw = torch.Generator().manual_seed(hash((seed, number)) % 2**63)
            chosen: list[int] = []
            while not chosen:
                chosen = (
                    torch.nonzero(torch.rand(count, generator=draw, dtype=torch.float64) < self.rate).flatten().tolist()
                )
            yield chosen


@dataclass(frozen=True)
class Subset:
    """Some of the samples, such as those of one client in a federation."""

    indices: tuple[int, ...]
    of: Sampler = field(default_factory=Shuffled)

    @property
    def fills_batches(self) -> bool:
        return self.of.fills_batches

    def refusal(self, count: int, size: int) -> str:
        outside = [index for index in self.indices if not 0 <= index < count]
        if outside:
            return (
                f"Subset names sample {outside[0]} of a data set of {count} samples: give numbers from 0 to {count - 1}"
            )
        return self.of.refusal(len(self.indices), size)

    def per_epoch(self, count: int, size: int) -> int:
        return self.of.per_epoch(len(self.indices), size)

    def batches(self, count: int, size: int, seed: int, begin: int) -> Iterator[list[int]]:
        for chosen in self.of.batches(len(self.indices), size, seed, begin):
            yield [self.indices[place] for place in chosen]
