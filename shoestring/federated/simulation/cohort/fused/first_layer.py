"""Trains the first linear layer of many devices in its dual form, per block of steps.

The layer is most of a small model, and every step of ten samples would rewrite all of it, which is bound by memory bandwidth. Its inputs
are data, so they are known beforehand. Therefore the weights are updated only after a block of several steps, by products that are large
enough to be fast. Until then, with D the rows  rate x gradient  of the block's steps so far and X their samples,

    z_t  =  x_t W^T + b  -  (x_t X^T + 1) D          the outputs of the updated weights, without computing those
    W    <-  W - D^T X                               at the end of the block

X W^T and the products of samples with each other are computed once per block. It is the same sum in another order:
equal to rounding.
The dual form of gradient descent on a linear layer is from Aizerman, Braverman, Rozonoer 1964.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoestring.federated.simulation.cohort.fused.dense import Dense
from shoestring.federated.simulation.cohort.fused.drift import Drift
from shoestring.federated.simulation.cohort.workspace import FusedChunk

# Samples per block at most. Measured: 40 to 130 are equally fast, 10 is a quarter slower. A device with a single block needs no copies
BLOCK = 128


class FirstLayerByBlock:
    """The first layer of a chunk's models, in the dual form per block of steps."""

    def __init__(self, dense: Dense, chunk: FusedChunk, inputs: Sequence[Tensor], drift: Drift) -> None:
        table = chunk.table
        self.dense, self.table, self.inputs, self.drift, self.workspace = dense, table, inputs, drift, chunk.workspace
        before, after = chunk.layout.views(chunk.start), chunk.layout.views(chunk.rows)
        self.begin, self.weights = (
            before[dense.weight],
            after[dense.weight],
        )  # (k, out, in): views of `start`, and of `rows`
        self.biases = None if dense.bias is None else after[dense.bias]
        self.bias = torch.zeros(len(chunk.rows), dense.width) if dense.bias is None else before[dense.bias][table.index]
        self.first_bias = self.bias.clone()
        # A drift changes the weights in every step, so updates can't be postponed
        self.steps = 1 if drift.active else max(BLOCK // table.batch, 1)  # per block
        self.single = [
            steps <= self.steps and not drift.active for steps in table.steps
        ]  # whether a device needs a single block
        self.x, self.z, self.d = (torch.empty(0),) * 3  # of the block: samples, X W^T + b, and D
        self.used: list[int] = []  # samples of each device in the block
        self.products: list[Tensor] = []  # products of every step's samples with those of earlier steps, plus 1

    def open(self, begin: int, end: int, active: int) -> None:
        """Begin a block: prepare the steps `begin` to `end` of the devices that are still training."""
        samples, batch, make = (end - begin) * self.table.batch, self.table.batch, self.workspace.tensor
        self.x, self.z, self.d = (
            make(name, active, samples, width)
            for name, width in (("x", self.dense.inputs), ("z", self.dense.width), ("d", self.dense.width))
        )
        self.used = self.table.used_samples(begin, end)[:active]
        weights = self.begin if begin == 0 else self.weights
        for row, device in enumerate(self.table.order[:active]):
            torch.index_select(self.inputs[row], 0, self.table.places[row, begin:end].view(-1), out=self.x[row])
            torch.mm(self.x[row, : self.used[row]], weights[device].mT, out=self.z[row, : self.used[row]])
            self.z[row, self.used[row] :] = 0  # padding: it has weight 0, but must be finite
        if self.dense.bias is not None:
            self.z.add_(self.bias[:active].unsqueeze(1))
        self.products = []
        for step in range(1, end - begin, 2):  # two steps at a time
            now, past = slice(step * batch, (step + 2) * batch), slice(0, min(step + 1, end - begin - 1) * batch)
            rows = self.x[:, now]
            made = torch.bmm(rows, self.x[:, past].mT, out=make(f"products {step}", active, rows.shape[1], past.stop))
            if self.dense.bias is not None:
                made.add_(1)
            self.products += [made[:, :batch, : step * batch], made[:, batch:]]

    def outputs(self, step: int, out: Tensor) -> None:
        """Write the layer's outputs in the block's n-th step to `out`."""
        past, now = slice(0, step * self.table.batch), slice(step * self.table.batch, (step + 1) * self.table.batch)
        if step:
            torch.baddbmm(self.z[:, now], self.products[step - 1], self.d[:, past], alpha=-1, out=out)
        else:
            out.copy_(self.z[:, now])

    def gradient(self, step: int) -> Tensor:
        """The memory for  rate x gradient  with respect to the layer's outputs in the block's n-th step."""
        return self.d[:, step * self.table.batch : (step + 1) * self.table.batch]

    def close(self, begin: int, active: int) -> None:
        """End the block: update the weights."""
        for row, device in enumerate(self.table.order[:active]):
            before, after = self.begin[device] if begin == 0 else self.weights[device], self.weights[device]
            d, x = self.d[row, : self.used[row]], self.x[row, : self.used[row]]
            if self.single[row]:  # a single block: write the change directly
                after.addmm_(d.mT, x, beta=0, alpha=-1)
                continue
            if self.drift.active:
                before = after.copy_(before)
                self.drift.move(self.dense.weight, after, row)
                if self.dense.bias is not None:
                    self.drift.move(self.dense.bias, self.bias[row], row)
            torch.addmm(before, d.mT, x, alpha=-1, out=after)
        self.bias[:active] -= self.d.sum(1)

    def finish(self) -> None:
        """Write the change of the weights to `rows`."""
        for row, device in enumerate(self.table.order):
            if not self.single[row]:
                self.weights[device].sub_(self.begin[device])
        if self.biases is not None:
            self.biases[self.table.index] = self.bias - self.first_bias
