"""The steps of a chunk of devices as rectangular tables, which hand-written steps go through column by column.

Devices are sorted by their steps, most first, so those that are still at work are always the first rows. A batch that is shorter than the
others is filled up with samples whose share of the loss is 0.

    share   1 / samples of the step; 0 for what only fills up
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from shoestring.core.local import Local
from shoestring.federated.cohort.schedule import drawn, step_sizes


@dataclass(frozen=True)
class Packed:
    order: list[int]      # the device of every row
    steps: list[int]      # of every row; never more than the row before has
    places: Tensor        # (k, steps, batch) int64: samples, among those that a device trains on
    shares: Tensor        # (k, steps, batch)

    @property
    def batch(self) -> int:
        return self.places.shape[2]

    @cached_property
    def index(self) -> Tensor:
        return torch.tensor(self.order)

    @cached_property
    def back(self) -> Tensor:
        """The row of every device."""
        return self.index.argsort()

    def active(self, step: int) -> int:
        """Rows that are still at work in a step."""
        return sum(steps > step for steps in self.steps)

    @property
    def samples(self) -> Tensor:
        """(k) that each of them trains on, those of every epoch counted."""
        return (self.shares > 0).sum((1, 2))


def packed(counts: Sequence[int], local: Local, seeds: Sequence[int]) -> Packed:
    sizes = [step_sizes(count, local) for count in counts]
    order = sorted(range(len(counts)), key=lambda one: -len(sizes[one]))   # stable: equal ones stay in their order
    width, length = max(max(one) for one in sizes), len(sizes[order[0]])
    places = torch.zeros(len(counts), length, width, dtype=torch.long)
    shares = torch.zeros(len(counts), length, width)
    for row, one in enumerate(order):
        filled(places[row], shares[row], sizes[one], drawn(counts[one], local, seeds[one]))
    return Packed(order, [len(sizes[one]) for one in order], places, shares)


def filled(places: Tensor, shares: Tensor, sizes: Sequence[int], order: Tensor) -> None:
    """One device's row of the tables."""
    if len(set(sizes)) == 1:
        steps, size = len(sizes), sizes[0]
        places[:steps, :size] = order[:steps * size].view(steps, size)
        shares[:steps, :size] = 1 / size
        return
    begin = 0
    for step, size in enumerate(sizes):
        places[step, :size] = order[begin:begin + size]
        shares[step, :size] = 1 / size
        begin += size
