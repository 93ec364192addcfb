"""Trains the first linear layer of many devices in its dual form, per sample: no step touches the layer's weights.

It pays for devices that use their samples in several epochs. Every step adds multiples of samples to the weights. So
the weights are determined by D, which has a row per sample: the sum of rate x gradient over the steps that used it.
With X all samples of a device and W, b where it began,

    z_t  =  (X W^T + b)[t]  -  (X X^T + 1)[t] D          [t]: the rows of the step's samples
    W    <-  W - D^T X                                   once, at the end

The large products are computed once, however many epochs there are, and X X^T is kept between rounds. first_layer.py
has the form that is faster for many samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoestring.federated.simulation.cohort.fused.dense import Dense
from shoestring.federated.simulation.cohort.workspace import FusedChunk


class DeviceSamples(NamedTuple):
    """A device's training samples in the form used here. It depends on the records alone, so it is cached with them."""

    inputs: Tensor  # X, (n, in)
    targets: Tensor  # (n)
    products: Tensor  # X X^T + 1 (without the 1 if the layer has no bias), (n, n); empty if there are too many samples


MOST = 1024  # samples of a device up to which X X^T is kept


def device_samples(inputs: Tensor, targets: Tensor, biased: bool) -> DeviceSamples:
    return DeviceSamples(
        inputs, targets, inputs @ inputs.mT + float(biased) if len(inputs) <= MOST else inputs.new_empty(0, 0)
    )


class FirstLayerBySample:
    """The first layer of a chunk's models, in the dual form per sample."""

    steps = 1  # per block: steps are prepared one by one

    def __init__(self, dense: Dense, chunk: FusedChunk, samples: Sequence[DeviceSamples]) -> None:
        layout, table = chunk.layout, chunk.table
        self.dense, self.layout, self.table, self.rows = dense, layout, table, chunk.rows
        self.inputs = [one.inputs for one in samples]
        count, most, make, before = (
            len(samples),
            max(map(len, self.inputs)),
            chunk.workspace.tensor,
            layout.views(chunk.start),
        )
        self.outside = make("outside", count, most, dense.width)  # X W^T + b
        self.products = make("products", count, most, most)  # X X^T + 1, padded with 0
        self.d = make("d", count, most, dense.width).zero_()
        # (steps, k, batch): indices of samples among those of all devices
        self.index = table.places.transpose(0, 1) + most * torch.arange(count).unsqueeze(1)
        for row, ((x, _, products), device) in enumerate(zip(samples, table.order, strict=True)):
            torch.mm(x, before[dense.weight][device].mT, out=self.outside[row, : len(x)])
            self.products[row, : len(x), : len(x)] = products
            self.products[row, : len(x), len(x) :] = 0
        if dense.bias is not None:
            self.outside += before[dense.bias][table.index].unsqueeze(1)
        self.now, self.found = self.index[0], make("found", count, table.batch, dense.width)

    def open(self, begin: int, end: int, active: int) -> None:
        self.now, self.found = self.index[begin, :active].reshape(-1), self.found[:active]

    def outputs(self, step: int, out: Tensor) -> None:
        active, batch, width = out.shape
        torch.index_select(self.outside.view(-1, width), 0, self.now, out=out.view(-1, width))
        rows = self.products.flatten(0, 1).index_select(0, self.now).view(active, batch, -1)
        out.baddbmm_(rows, self.d[:active], alpha=-1)

    def gradient(self, step: int) -> Tensor:
        return self.found

    def close(self, begin: int, active: int) -> None:
        self.d.view(-1, self.dense.width).index_add_(0, self.now, self.found.view(-1, self.dense.width))

    def finish(self) -> None:
        """Write the change of the weights to `rows`."""
        views = self.layout.views(self.rows)
        for row, (x, device) in enumerate(zip(self.inputs, self.table.order, strict=True)):
            views[self.dense.weight][device].addmm_(self.d[row, : len(x)].mT, x, beta=0, alpha=-1)
        if self.dense.bias is not None:
            views[self.dense.bias][self.table.index] = self.d.sum(1).neg_()
