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
from shoestring.federated.simulation.cohort.schedule import drawn, step_sizes


@dataclass(frozen=True)
class PackedRows:
    order: list[int]  # the device of every row
    steps: list[int]  # of every row; never more than the row before has
    places: Tensor  # (k, steps, batch) int64: samples, among those that a device trains on
    shares: Tensor  # (k, steps, batch)

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

    def used(self, begin: int, end: int) -> list[int]:
        """Of every row, the samples of some steps up to the last that has a share: what comes behind only fills up."""
        shares = self.shares[:, begin:end].flatten(1) > 0
        return (shares * torch.arange(1, shares.shape[1] + 1)).amax(1).tolist()

    @property
    def samples(self) -> Tensor:
        """(k) that each of them trains on, those of every epoch counted."""
        return (self.shares > 0).sum((1, 2))


def packed(counts: Sequence[int], local: Local, seeds: Sequence[int]) -> PackedRows:
    sizes = [step_sizes(count, local) for count in counts]
    order = sorted(range(len(counts)), key=lambda one: -len(sizes[one]))  # stable: equal ones stay in their order
    width, length = max(one[0] for one in sizes), len(sizes[order[0]])  # no step is larger than the first
    places = torch.zeros(len(counts), length, width, dtype=torch.long)
    for row, one in enumerate(order):
        fill(places[row], counts[one], sizes[one], drawn(counts[one], local, seeds[one]))
    used = torch.tensor([sizes[one] + [0] * (length - len(sizes[one])) for one in order]).unsqueeze(2)
    return PackedRows(
        order, [len(sizes[one]) for one in order], places, (torch.arange(width) < used) / used.clamp(min=1)
    )


def fill(places: Tensor, count: int, sizes: Sequence[int], samples: Tensor) -> None:
    """One device's row of the table, an epoch at a time: its steps are full but for the last."""
    steps = -(-count // sizes[0])
    for epoch, begin in enumerate(range(0, len(sizes), steps)):
        # A batch that is shorter than others' is the only one of its epoch, so an epoch's places lie together either way
        row = places[begin, : sizes[0]] if steps == 1 else places[begin : min(begin + steps, len(sizes))].view(-1)
        mine = samples[epoch * count : (epoch + 1) * count][: len(row)]
        row[: len(mine)] = mine
