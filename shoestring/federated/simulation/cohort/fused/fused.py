"""The fused method: hand-written SGD steps for models of linear layers, as stacked matrix products for many devices,
without autograd.

A step with learning rate r on a layer  z = x W^T + b,  with g the gradient with respect to z:

    W  <-  W - r g^T x            one in-place product (baddbmm), without storing a weight gradient

All memory is reused between chunks. The first layer has its own forms (first_layer.py, by_sample.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from shoestring.federated.devices.records import Records
from shoestring.federated.model.layout import Layout
from shoestring.federated.round import Objective
from shoestring.federated.simulation.cohort.fused.by_sample import (
    MOST,
    DeviceSamples,
    FirstLayerBySample,
    device_samples,
)
from shoestring.federated.simulation.cohort.fused.dense import Dense
from shoestring.federated.simulation.cohort.fused.drift import Drift, drift_of
from shoestring.federated.simulation.cohort.fused.first_layer import BLOCK, FirstLayerByBlock
from shoestring.federated.simulation.cohort.method import CohortUpdates, Unsuitable, refuse_unusual_steps
from shoestring.federated.simulation.cohort.step_table import StepTable, step_table
from shoestring.federated.simulation.cohort.workspace import FusedChunk, Workspace


@dataclass(frozen=True)
class FusedMethod:
    layout: Layout
    dense: tuple[Dense, ...]
    workspace: Workspace = field(default_factory=Workspace)

    @torch.no_grad()
    def train(
        self, start: Tensor, records: Sequence[Records], objective: Objective, seeds: Sequence[int]
    ) -> CohortUpdates:
        refuse_unusual_steps(objective.local)
        if objective.local.optimizer is not None:
            raise Unsuitable("devices do not train by plain SGD")
        table = step_table([one.count for one in records], objective.local, seeds)
        samples = [cached_samples(records[one], self.dense) for one in table.order]
        classes = torch.stack(
            [one.targets[places] for one, places in zip(samples, table.places, strict=True)], dim=1
        ).unsqueeze(-1)
        rows, drift = torch.empty(len(start), self.layout.size), drift_of(objective, self.layout, table.index)
        first = self.first_layer(FusedChunk(self.layout, start, rows, table, self.workspace), samples, drift)
        steps = FusedSteps(table, first, stacked_layers(self, start, table), classes, drift)
        for begin in range(0, table.steps[0], first.steps):
            steps.block(begin, min(begin + first.steps, table.steps[0]))
        first.finish()
        views, before = self.layout.views(rows), self.layout.views(start)
        for layer in steps.layers[1:]:
            layer.store(views, before, table.index)
        return CohortUpdates(rows, steps.losses()[table.back], torch.tensor(table.steps)[table.back])

    def first_layer(
        self, chunk: FusedChunk, samples: Sequence[DeviceSamples], drift: Drift
    ) -> FirstLayerByBlock | FirstLayerBySample:
        """Choose the form with fewer operations, for n samples, e epochs, d inputs, a width of w and blocks of m
        samples:

        by sample      4 n d w        +  2 e n^2 w
        by block    e (4 n d w        +  n m (d + w))
        """
        dense, most = self.dense[0], max(len(one.inputs) for one in samples)
        epochs, block = chunk.table.steps[0] * chunk.table.batch / most, min(most, BLOCK)
        by_sample = 4 * dense.inputs * dense.width + 2 * epochs * most * dense.width
        by_block = epochs * (4 * dense.inputs * dense.width + block * (dense.inputs + dense.width))
        if not drift.active and most <= MOST and by_sample < by_block:
            return FirstLayerBySample(dense, chunk, samples)
        return FirstLayerByBlock(dense, chunk, [one.inputs for one in samples], drift)


def cached_samples(records: Records, dense: Sequence[Dense]) -> DeviceSamples:
    width, classes, biased = dense[0].inputs, dense[-1].width, dense[0].bias is not None
    key = f"samples {width} {classes} {biased}"
    if key not in records.cache:
        records.cache[key] = device_samples(*inputs_and_classes(records, width, classes), biased)
    found: DeviceSamples = records.cache[key]
    return found


def inputs_and_classes(records: Records, width: int, classes: int) -> tuple[Tensor, Tensor]:
    """A device's training samples as a matrix (n, width), and their classes."""
    whole = records.whole
    if not isinstance(whole, (tuple, list)) or len(whole) != 2:
        raise Unsuitable("its samples are not pairs of an input and a class")
    inputs, targets = (
        whole if records.count == len(whole[0]) else (whole[0][records.trained], whole[1][records.trained])
    )
    if inputs.dtype != torch.float32 or inputs.numel() != len(inputs) * width:
        raise Unsuitable(f"its inputs are not rows of {width} numbers of 32 bits")
    if targets.dtype != torch.long or targets.dim() != 1 or not 0 <= int(targets.min()) <= int(targets.max()) < classes:
        raise Unsuitable("its targets are not classes, or some are ignored (negative)")
    return inputs.reshape(len(inputs), width), targets


@dataclass(frozen=True)
class FusedLayer:
    """One layer of all models of a chunk. The first layer's weights are kept elsewhere (first_layer.py, by_sample.py)."""

    dense: Dense
    weight: Tensor  # (k, out, in)
    bias: Tensor | None  # (k, 1, out)
    z: Tensor  # (k, batch, out): outputs before the activation
    result: Tensor  # outputs after the activation; for the last layer: exp(z - max)
    gradient: Tensor  # learning rate x gradient with respect to z

    def first_rows(self, count: int) -> FusedLayer:
        """The layer for the first rows only: views of the same memory."""
        bias = None if self.bias is None else self.bias[:count]
        return FusedLayer(
            self.dense, self.weight[:count], bias, self.z[:count], self.result[:count], self.gradient[:count]
        )

    def forward(self, x: Tensor) -> None:
        if self.bias is None:
            torch.bmm(x, self.weight.mT, out=self.z)
        else:
            torch.baddbmm(self.bias, x, self.weight.mT, out=self.z)

    def activate(self) -> None:
        assert self.dense.activation is not None, "only the last layer has none"
        self.dense.activation.forward(self.z, self.result)

    def back(self, into: Tensor) -> None:
        """Turn the gradient with respect to the result into that with respect to z, and write it to `into`."""
        assert self.dense.activation is not None, "only the last layer has none"
        self.dense.activation.backward(self.gradient, self.z, self.result, into)

    def move(self, x: Tensor, drift: Drift) -> None:
        if drift.active:
            for row in range(len(self.weight)):
                drift.move(self.dense.weight, self.weight[row], row)
                if self.bias is not None and self.dense.bias is not None:
                    drift.move(self.dense.bias, self.bias[row], row)
        self.weight.baddbmm_(self.gradient.mT, x, alpha=-1)
        if self.bias is not None:
            self.bias.sub_(self.gradient.sum(1, keepdim=True))

    def store(self, views: dict[str, Tensor], start: dict[str, Tensor], index: Tensor) -> None:
        """Write the change of the weights to the devices' rows."""
        views[self.dense.weight][index] = self.weight - start[self.dense.weight][index]
        if self.bias is not None and self.dense.bias is not None:
            views[self.dense.bias][index] = self.bias.squeeze(1) - start[self.dense.bias][index]


def stacked_layers(method: FusedMethod, start: Tensor, table: StepTable) -> list[FusedLayer]:
    """All layers, with weights copied from the devices' rows and stacked in the order of `table`."""
    views, count, make, layers = method.layout.views(start), len(table.order), method.workspace.tensor, []
    for place, dense in enumerate(method.dense):
        weight, bias = torch.empty(count, 0, 0), None
        if place:
            weight = make(f"weight {place}", count, dense.width, dense.inputs)
            torch.index_select(views[dense.weight], 0, table.index, out=weight)
            bias = None if dense.bias is None else views[dense.bias][table.index].unsqueeze(1)
        made = [make(f"{name} {place}", count, table.batch, dense.width) for name in ("z", "result", "gradient")]
        layers.append(FusedLayer(dense, weight, bias, *made))
    return layers


class FusedSteps:
    """The steps of a chunk's devices.

    The gradient with respect to the last layer's outputs z is  share (softmax - [class]).  Times the learning rate, and with m the maximum
    of a sample's z, it is

        exp(z - m) (scale / sum exp(z - m))  -  hits          loss  =  m + log sum exp(z - m) - z[class]

    Computed in these steps it takes a third of the time of torch.softmax, which is slow for few classes.
    """

    def __init__(
        self,
        table: StepTable,
        first: FirstLayerByBlock | FirstLayerBySample,
        layers: list[FusedLayer],
        classes: Tensor,
        drift: Drift,
    ) -> None:
        self.table, self.first, self.layers, self.drift = table, first, layers, drift
        self.classes = classes  # (steps, k, batch, 1)
        self.scale = (table.shares * drift.rate).transpose(0, 1).unsqueeze(-1).contiguous()
        outputs = (*classes.shape[:-1], layers[-1].dense.width)
        self.hits = torch.zeros(outputs).scatter_(3, classes, -self.scale)  # -scale at the class, 0 elsewhere
        self.outputs = torch.zeros(outputs)  # z of every step
        self.most = torch.zeros(classes.shape)  # m
        self.sums = torch.ones(classes.shape)  # of exp(z - m)

    def block(self, begin: int, end: int) -> None:
        active = self.table.active(begin)
        layers = [layer.first_rows(active) for layer in self.layers]
        self.first.open(begin, end, active)
        for step in range(begin, end):
            layers[-1] = replace(layers[-1], z=self.outputs[step, :active])
            self.first.outputs(step - begin, layers[0].z)
            self.forward(layers, step)
            self.backward(layers, self.first.gradient(step - begin))
        self.first.close(begin, active)

    def forward(self, layers: list[FusedLayer], step: int) -> None:
        """Run the layers behind the first one, up to the gradient with respect to the last layer's outputs."""
        for before, layer in pairwise(layers):
            before.activate()
            layer.forward(before.result)
        last, active = layers[-1], len(layers[-1].z)
        most, total = self.most[step, :active], self.sums[step, :active]
        torch.amax(last.z, 2, keepdim=True, out=most)
        torch.sub(last.z, most, out=last.result).exp_()
        torch.sum(last.result, 2, keepdim=True, out=total)
        torch.addcmul(self.hits[step, :active], last.result, self.scale[step, :active] / total, out=last.gradient)

    def losses(self) -> Tensor:
        """Mean training loss of every device over its samples, (k) float64."""
        found = (self.sums.log().add_(self.most).sub_(self.outputs.gather(3, self.classes))).squeeze(3).transpose(0, 1)
        return (found * (self.table.shares > 0)).sum((1, 2), dtype=torch.float64) / self.table.samples

    def backward(self, layers: list[FusedLayer], into: Tensor) -> None:
        """Update every layer's weights as soon as they are no longer needed; write the first layer's gradient to
        `into`."""
        for place in range(len(layers) - 1, 0, -1):
            before, layer = layers[place - 1], layers[place]
            torch.bmm(layer.gradient, layer.weight, out=before.gradient)
            layer.move(before.result, self.drift)
            before.back(before.gradient if place > 1 else into)
        if len(layers) == 1:
            into.copy_(layers[0].gradient)
