"""Which samples a device trains on in which step: all ways of training follow it, so they differ in nothing but rounding.

epoch e     a permutation of its samples, drawn from (seed, e)
steps       `batch` samples each in that order; the last of an epoch has what is left
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shoestring.core.local import Local
from shoestring.federated.seeds import seed_of


def orders(count: int, local: Local, seed: int) -> Iterator[Tensor]:
    """The places of `count` samples in the order of each epoch."""
    generator = torch.Generator()
    for epoch in range(local.epochs):
        yield torch.randperm(count, generator=generator.manual_seed(seed_of(seed, "epoch", epoch)))


def step_sizes(count: int, local: Local) -> list[int]:
    """Samples of every step.

    >>> step_sizes(25, Local(epochs=2, batch=10, steps=5))
    [10, 10, 5, 10, 10]
    """
    batch = min(local.batch or count, count)
    epoch = [min(batch, count - begin) for begin in range(0, count, batch)]
    sizes = epoch * local.epochs
    return sizes[: local.steps] if local.steps else sizes


def drawn(count: int, local: Local, seed: int) -> Tensor:
    """The places of all steps' samples, one step after the other."""
    epochs = list(orders(count, local, seed))
    return epochs[0] if len(epochs) == 1 else torch.cat(epochs)


def batches(count: int, local: Local, seed: int) -> Iterator[Tensor]:
    """The places of every step's samples, among those that are trained on."""
    places, begin = drawn(count, local, seed), 0
    for size in step_sizes(count, local):
        yield places[begin : begin + size]
        begin += size
