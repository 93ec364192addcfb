"""The steps of a chunk of devices as rectangular tables, a row per device and a column per step.

Devices are sorted by their number of steps, most first, so the devices that are still training are always the first
rows. Short batches are padded with samples whose weight in the loss is 0.

    share   weight of a sample in the loss: 1 / samples of the step; 0 for padding
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from shoestring.core.clients.local import Local
from shoestring.federated.simulation.cohort.schedule import sample_order, step_sizes


@dataclass(frozen=True)
class StepTable:
    order: list[int]  # the device of every row
    steps: list[int]  # steps of every row, in descending order
    places: Tensor  # (k, steps, batch) int64: indices into a device's training samples
    shares: Tensor  # (k, steps, batch)

    @property
    def batch(self) -> int:
        return self.places.shape[2]

    @cached_property
    def index(self) -> Tensor:
        return torch.tensor(self.order)

    @cached_property
    def back(self) -> Tensor:
        """For every device, its row."""
        return self.index.argsort()

    def active(self, step: int) -> int:
        """How many rows are still training in a step."""
        return sum(steps > step for steps in self.steps)

    def used_samples(self, begin: int, end: int) -> list[int]:
        """For every row, how many of the samples of these steps are used: those behind the last one with a weight are
        padding."""
        shares = self.shares[:, begin:end].flatten(1) > 0
        return (shares * torch.arange(1, shares.shape[1] + 1)).amax(1).tolist()

    @property
    def samples(self) -> Tensor:
        """Samples that every row trains on in all epochs together (k)."""
        return (self.shares > 0).sum((1, 2))


def step_table(counts: Sequence[int], local: Local, seeds: Sequence[int]) -> StepTable:
    sizes = [step_sizes(count, local) for count in counts]
    order = sorted(range(len(counts)), key=lambda one: -len(sizes[one]))  # stable: equals keep their order
    width, length = max(one[0] for one in sizes), len(sizes[order[0]])  # the first step is the largest
    places = torch.zeros(len(counts), length, width, dtype=torch.long)
    for row, one in enumerate(order):
        fill_row(places[row], counts[one], sizes[one], sample_order(counts[one], local, seeds[one]))
    used = torch.tensor([sizes[one] + [0] * (length - len(sizes[one])) for one in order]).unsqueeze(2)
    return StepTable(
        order, [len(sizes[one]) for one in order], places, (torch.arange(width) < used) / used.clamp(min=1)
    )


def fill_row(places: Tensor, count: int, sizes: Sequence[int], samples: Tensor) -> None:
    """Fill one device's row, epoch by epoch: all steps of an epoch are full except the last."""
    steps = -(-count // sizes[0])
    for epoch, begin in enumerate(range(0, len(sizes), steps)):
        # A device with shorter batches than others has one step per epoch, so an epoch's indices are contiguous in both cases
        row = places[begin, : sizes[0]] if steps == 1 else places[begin : min(begin + steps, len(sizes))].view(-1)
        mine = samples[epoch * count : (epoch + 1) * count][: len(row)]
        row[: len(mine)] = mine
