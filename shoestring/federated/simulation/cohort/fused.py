"""Steps of linear layers written by hand, for many devices at once: stacked matrix products without autograd, in memory made once.

Of a step of SGD with rate r on a layer  z = x W^T + b,  with g the gradient to z:

    W  <-  W - r g^T x            one product that adds to the weights where they lie (baddbmm), no gradient is ever stored

The first layer has a form of its own (first_layer.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from shoestring.federated.layout import Layout
from shoestring.federated.records import Records
from shoestring.federated.round import Objective
from shoestring.federated.simulation.cohort.by_sample import MOST, BySample, DeviceSamples, samples_of
from shoestring.federated.simulation.cohort.dense import Dense
from shoestring.federated.simulation.cohort.drift import Drift, drift_of
from shoestring.federated.simulation.cohort.first_layer import BLOCK, FirstLayer
from shoestring.federated.simulation.cohort.packed import PackedRows, packed
from shoestring.federated.simulation.cohort.way import Moved, Unsuitable, check_steps
from shoestring.federated.simulation.cohort.workspace import Workspace


@dataclass(frozen=True)
class FusedMethod:
    layout: Layout
    dense: tuple[Dense, ...]
    workspace: Workspace = field(default_factory=Workspace)

    @torch.no_grad()
    def moved(self, start: Tensor, records: Sequence[Records], objective: Objective, seeds: Sequence[int]) -> Moved:
        check_steps(objective.local)
        if objective.local.optimizer is not None:
            raise Unsuitable("devices do not train by plain SGD")
        table = packed([one.count for one in records], objective.local, seeds)
        samples = [kept_samples(records[one], self.dense) for one in table.order]
        classes = torch.stack(
            [one.targets[places] for one, places in zip(samples, table.places, strict=True)], dim=1
        ).unsqueeze(-1)
        rows, drift = torch.empty(len(start), self.layout.size), drift_of(objective, self.layout, table.index)
        first = self.first_layer(start, rows, table, samples, drift)
        steps = FusedSteps(table, first, stacked_layers(self, start, table), classes, drift)
        for begin in range(0, table.steps[0], first.steps):
            steps.block(begin, min(begin + first.steps, table.steps[0]))
        first.finish()
        views, before = self.layout.views(rows), self.layout.views(start)
        for layer in steps.layers[1:]:
            layer.store(views, before, table.index)
        return Moved(rows, steps.losses()[table.back], torch.tensor(table.steps)[table.back])

    def first_layer(
        self, start: Tensor, rows: Tensor, table: PackedRows, samples: Sequence[DeviceSamples], drift: Drift
    ) -> FirstLayer | BySample:
        """In the form that has less to do. Operations with n samples, e epochs, inputs of d numbers, a width w and blocks of m samples:

        by sample      4 n d w        +  2 e n^2 w
        by block    e (4 n d w        +  n m (d + w))
        """
        dense, most = self.dense[0], max(len(one.inputs) for one in samples)
        epochs, block = table.steps[0] * table.batch / most, min(most, BLOCK)
        by_sample = 4 * dense.inputs * dense.width + 2 * epochs * most * dense.width
        by_block = epochs * (4 * dense.inputs * dense.width + block * (dense.inputs + dense.width))
        if not drift.some and most <= MOST and by_sample < by_block:
            return BySample(dense, self.layout, start, rows, table, samples, self.workspace)
        return FirstLayer(
            dense, self.layout, start, rows, table, [one.inputs for one in samples], drift, self.workspace
        )


def kept_samples(records: Records, dense: Sequence[Dense]) -> DeviceSamples:
    width, classes, biased = dense[0].inputs, dense[-1].width, dense[0].bias is not None
    key = f"samples {width} {classes} {biased}"
    if key not in records.made_of:
        records.made_of[key] = samples_of(*pair_of(records, width, classes), biased)
    found: DeviceSamples = records.made_of[key]
    return found


def pair_of(records: Records, width: int, classes: int) -> tuple[Tensor, Tensor]:
    """The samples that a device trains on, (n, width), and their classes."""
    whole = records.whole
    if not isinstance(whole, (tuple, list)) or len(whole) != 2:
        raise Unsuitable("its samples are not pairs of an input and a class")
    inputs, targets = (
        whole if records.count == len(whole[0]) else (whole[0][records.trained], whole[1][records.trained])
    )
    if inputs.dtype != torch.float32 or inputs.numel() != len(inputs) * width:
        raise Unsuitable(f"its inputs are not rows of {width} numbers of 32 bits")
    if targets.dtype != torch.long or targets.dim() != 1 or not 0 <= int(targets.min()) <= int(targets.max()) < classes:
        raise Unsuitable("its targets are not classes, or some are left out")
    return inputs.reshape(len(inputs), width), targets


@dataclass(frozen=True)
class FusedLayer:
    """A layer of a chunk's models. The first one's weights are not here."""

    dense: Dense
    weight: Tensor  # (k, out, in)
    bias: Tensor | None  # (k, 1, out)
    z: Tensor  # (k, batch, out): what comes out,
    result: Tensor  # and after the activation (of the last layer: exp(z - largest))
    gradient: Tensor  # the rate times the gradient to z

    def some(self, count: int) -> FusedLayer:
        """The same of the first rows."""
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
        """Turn the gradient to the result, which lies where that to z will, into that to z."""
        assert self.dense.activation is not None, "only the last layer has none"
        self.dense.activation.backward(self.gradient, self.z, self.result, into)

    def move(self, x: Tensor, drift: Drift) -> None:
        if drift.some:
            for row in range(len(self.weight)):
                drift.move(self.dense.weight, self.weight[row], row)
                if self.bias is not None and self.dense.bias is not None:
                    drift.move(self.dense.bias, self.bias[row], row)
        self.weight.baddbmm_(self.gradient.mT, x, alpha=-1)
        if self.bias is not None:
            self.bias.sub_(self.gradient.sum(1, keepdim=True))

    def store(self, views: dict[str, Tensor], start: dict[str, Tensor], index: Tensor) -> None:
        """Put into the devices' rows by how much the weights have changed."""
        views[self.dense.weight][index] = self.weight - start[self.dense.weight][index]
        if self.bias is not None and self.dense.bias is not None:
            views[self.dense.bias][index] = self.bias.squeeze(1) - start[self.dense.bias][index]


def stacked_layers(way: FusedMethod, start: Tensor, table: PackedRows) -> list[FusedLayer]:
    """The layers' weights, copied from the devices' rows and stacked in the order of `table`."""
    views, count, make, layers = way.layout.views(start), len(table.order), way.workspace.tensor, []
    for place, dense in enumerate(way.dense):
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

    The gradient to the last layer's outputs z is  share (softmax - [class]);  with the rate in it, and m the largest of a sample's z,

        exp(z - m) (scale / sum exp(z - m))  -  hits          loss  =  m + log sum exp(z - m) - z[class]

    Step by step like this it takes a third of the time of torch.softmax, which is slow where there are few classes.
    """

    def __init__(
        self, table: PackedRows, first: FirstLayer | BySample, layers: list[FusedLayer], classes: Tensor, drift: Drift
    ) -> None:
        self.table, self.first, self.layers, self.drift = table, first, layers, drift
        self.classes = classes  # (steps, k, batch, 1)
        self.scale = (table.shares * drift.rate).transpose(0, 1).unsqueeze(-1).contiguous()
        outputs = (*classes.shape[:-1], layers[-1].dense.width)
        self.hits = torch.zeros(outputs).scatter_(3, classes, -self.scale)  # minus the scale where the class is, else 0
        self.outputs = torch.zeros(outputs)  # z, in every step
        self.most = torch.zeros(classes.shape)  # m
        self.sums = torch.ones(classes.shape)  # of exp(z - m)

    def block(self, begin: int, end: int) -> None:
        active = self.table.active(begin)
        layers = [layer.some(active) for layer in self.layers]
        self.first.open(begin, end, active)
        for step in range(begin, end):
            layers[-1] = replace(layers[-1], z=self.outputs[step, :active])
            self.first.outputs(step - begin, layers[0].z)
            self.forward(layers, step)
            self.backward(layers, self.first.gradient(step - begin))
        self.first.close(begin, active)

    def forward(self, layers: list[FusedLayer], step: int) -> None:
        """From what the first layer gives to the gradient to what the last one does."""
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
        """(k) float64: of every device, the mean over its samples."""
        found = (self.sums.log().add_(self.most).sub_(self.outputs.gather(3, self.classes))).squeeze(3).transpose(0, 1)
        return (found * (self.table.shares > 0)).sum((1, 2), dtype=torch.float64) / self.table.samples

    def backward(self, layers: list[FusedLayer], into: Tensor) -> None:
        """Every layer's weights move as soon as nothing needs them any more; the first one's gradient is left in `into`."""
        for place in range(len(layers) - 1, 0, -1):
            before, layer = layers[place - 1], layers[place]
            torch.bmm(layer.gradient, layer.weight, out=before.gradient)
            layer.move(before.result, self.drift)
            before.back(before.gradient if place > 1 else into)
        if len(layers) == 1:
            into.copy_(layers[0].gradient)
