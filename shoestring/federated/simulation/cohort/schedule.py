"""Which samples a device trains on in every step. All simulation methods follow it, so their results differ by rounding
only.

epoch e     a permutation of the device's samples, drawn from (seed, e)
steps       `batch` samples each in that order; the last step of an epoch has the rest
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shoestring.core.clients.local import Local
from shoestring.federated.playing.seeds import seed_of


def epoch_orders(count: int, local: Local, seed: int) -> Iterator[Tensor]:
    """A permutation of `count` sample indices for every epoch."""
    generator = torch.Generator()
    for epoch in range(local.epochs):
        yield torch.randperm(count, generator=generator.manual_seed(seed_of(seed, "epoch", epoch)))


def step_sizes(count: int, local: Local) -> list[int]:
    """Batch size of every step.

    >>> step_sizes(25, Local(epochs=2, batch=10, steps=5))
    [10, 10, 5, 10, 10]
    """
    batch = min(local.batch or count, count)
    epoch = [min(batch, count - begin) for begin in range(0, count, batch)]
    sizes = epoch * local.epochs
    return sizes[: local.steps] if local.steps else sizes


def sample_order(count: int, local: Local, seed: int) -> Tensor:
    """The sample indices of all steps in one row."""
    epochs = list(epoch_orders(count, local, seed))
    return epochs[0] if len(epochs) == 1 else torch.cat(epochs)


def batches(count: int, local: Local, seed: int) -> Iterator[Tensor]:
    """The sample indices of every step."""
    places, begin = sample_order(count, local, seed), 0
    for size in step_sizes(count, local):
        yield places[begin : begin + size]
        begin += size
