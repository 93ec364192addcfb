"""The stacked method: one forward and backward for many devices' models, with weights stacked to (k, ...) and an
elementwise optimizer.

Devices' losses do not depend on each other's weights, so the gradient of their sum is every device's own:

    d (loss_1 + ... + loss_k) / d W_i  =  d loss_i / d W_i

Autograd runs once for all of them. convolutional.py calls image models with stacked weights, vmapped.py all other
models. If batch sizes differ within a step, devices with equal batch sizes are called together, which is right for
every loss. If the loss is the cross entropy with one class per sample, and samples do not interact, short batches are
padded with samples of weight 0 instead: a single call for all.

Some rounds compare one device of every new shape with the plain loop, because a trial before the first round can't know
all shapes and records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.core.batch import Batch, leaves, map_leaves
from shoestring.core.job import Job, default_loss
from shoestring.core.running import random_state
from shoestring.federated.devices.records import Records
from shoestring.federated.model.layout import Layout
from shoestring.federated.playing.seeds import seed_of
from shoestring.federated.round import Objective
from shoestring.federated.simulation.cohort.method import CohortUpdates, Unsuitable, refuse_unusual_steps
from shoestring.federated.simulation.cohort.sequential import SequentialMethod, load_device, local_optimizer
from shoestring.federated.simulation.cohort.sgd import Optimizer, Sgd
from shoestring.federated.simulation.cohort.stacked.gradient_comparison import GradientComparison
from shoestring.federated.simulation.cohort.stacked.recording import Gradients, Weights, match_strides
from shoestring.federated.simulation.cohort.step_table import StepTable, step_table

Outputs = Callable[[Weights, Batch], Any]  # of the model; all tensors, the batch's too, are (k, batch, ...)

OPTIMIZERS = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adadelta,
    torch.optim.Adamax,
)  # elementwise optimizers
FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


@dataclass(frozen=True)
class StackedMethod:
    plain: SequentialMethod
    outputs: Outputs
    masks: bool = False  # pad short batches, if the loss is the cross entropy with one class per sample
    whole: Callable[[Weights, Batch], Tensor] | None = (
        None  # computes the devices' losses (k) directly, if batches are not padded
    )
    draws: bool = False  # the model has dropout

    @cached_property
    def gradients(self) -> Gradients:
        return Gradients(self.losses, self.plain.model)

    @cached_property
    def gradients_of_classes(self) -> Gradients:
        """Gradients for cross entropy with one class per sample, none of them ignored."""
        return Gradients(
            lambda weights, batch, shares: self.losses(weights, batch, shares, classes=True), self.plain.model
        )

    def losses(self, weights: Weights, batch: Batch, shares: Tensor | None, classes: bool = False) -> Tensor:
        """Every device's loss (k). `shares` (k, batch), only with `classes`: the samples' weights; None: all are equal."""
        if self.whole is not None and not classes:
            return self.whole(weights, batch)
        found = self.outputs(weights, batch)
        if classes and isinstance(found, Tensor) and found.dim() == 3:
            each = nn.functional.cross_entropy(found.flatten(0, 1), batch[1].flatten(), reduction="none").view(
                found.shape[:2]
            )
            return each.mean(1) if shares is None else (each * shares).sum(1)
        if shares is not None:
            raise Unsuitable("its outputs are not a row of numbers per sample, so short batches can't be padded")
        return torch.func.vmap(self.plain.job.loss, randomness="different")(found, batch)

    def train(
        self,
        start: Tensor,
        records: Sequence[Records],
        objective: Objective,
        seeds: Sequence[int],
        checks: bool = False,
    ) -> CohortUpdates:
        """`checks`: compare with the plain loop on the way, and raise MethodDiffers if something differs."""
        refuse_unusual_steps(objective.local)
        layout, model = self.plain.layout, self.plain.model
        table = step_table([one.count for one in records], objective.local, seeds)
        load_device(layout, model, start[0], self.plain.outside)  # restores the state outside of the row
        model.train()
        with random_state.fork_rng():
            random_state.seed(seed_of("chunk", *seeds))  # the models draw random numbers together
            steps = StackedSteps(self, table, start, [records[one] for one in table.order], objective, checks)
            for step in range(table.steps[0]):
                steps.step(step)
        steps.retire(0)
        return CohortUpdates(steps.rows, steps.losses(), torch.tensor(table.steps)[table.back])


def has_class_targets(data: Batch) -> bool:
    """Whether every sample has one class, and none is ignored (negative)."""
    return (
        isinstance(data, (tuple, list))
        and len(data) > 1
        and isinstance(data[1], Tensor)
        and data[1].dtype == torch.long
        and data[1].dim() == 1
        and int(data[1].min()) >= 0
    )


class StackedSteps:
    """Trains the devices of a chunk step by step. Rows are in the order of `table`."""

    def __init__(
        self,
        method: StackedMethod,
        table: StepTable,
        start: Tensor,
        records: Sequence[Records],
        objective: Objective,
        checks: bool = False,
    ) -> None:
        self.method, self.table, self.start, self.objective = method, table, start, objective
        self.layout, self.stacked, self.active = (
            method.plain.layout,
            len(records),
            len(records),
        )  # rows of the stack; rows still training
        self.rows = torch.empty(len(records), self.layout.size)
        self.total = torch.zeros(len(records), dtype=torch.float64)
        self.data, self.places = concatenate_samples(records, table)
        self.sizes = (table.shares > 0).sum(2)  # (k, steps): batch sizes
        classes = method.plain.job.loss is default_loss and has_class_targets(self.data)
        self.gradients = method.gradients_of_classes if classes else method.gradients
        self.masks = method.masks and classes
        self.comparison = GradientComparison(method.plain, self.gradients, method.draws) if checks else None
        self.weights = {name: channels_last(view[table.index]) for name, view in self.layout.views(start).items()}
        self.optimizer = stacked_optimizer(method.plain.job, objective, method.plain.model, self.weights)
        trained = Layout(tuple(entry for entry in self.layout.entries if entry.trained))
        self.anchor = (
            {} if not objective.pull or objective.anchor is None else trained.views(objective.anchor[: trained.size])
        )
        self.correction = {} if objective.correction is None else trained.views(objective.correction[table.index])

    @torch.no_grad()
    def step(self, step: int) -> None:
        self.retire(self.table.active(step))
        self.optimizer.zero_grad(set_to_none=True)
        sizes = self.sizes[: self.stacked, step]  # 0: the device is done
        if bool((sizes == sizes[0]).all()):
            self.find_gradients(None, step, int(sizes[0]))
        elif self.masks:
            self.find_gradients(None, step, self.table.batch, self.table.shares[: self.stacked, step])
        else:
            for size in sizes.unique().tolist():
                self.find_gradients((sizes == size).nonzero().squeeze(1), step, size)
        self.add_objective_gradients()
        self.optimizer.step()

    def find_gradients(self, some: Tensor | None, step: int, size: int, shares: Tensor | None = None) -> None:
        """Compute the gradients of some rows; None: of the whole stack."""
        rows = slice(0, self.stacked) if some is None else some
        places = self.places[rows, step, :size]
        weights = (
            self.weights if some is None else {name: one.index_select(0, some) for name, one in self.weights.items()}
        )
        counts = self.sizes[rows, step]
        if self.comparison is not None:
            self.comparison.check(weights, lambda: map_leaves(lambda leaf: leaf[places], self.data), shares, counts)
        losses, gradients = self.gradients(weights, map_leaves(lambda leaf: leaf[places], self.data), shares)
        self.total[rows] += torch.where(counts > 0, losses.double() * counts, 0.0)  # finished devices may have any loss
        for weight, gradient in zip(self.weights.values(), gradients, strict=True):
            if gradient is not None and some is None:
                weight.grad = match_strides(weight, gradient)
            elif gradient is not None:
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
                weight.grad[some] = gradient

    @torch.no_grad()
    def add_objective_gradients(self) -> None:
        """Add the objective's pull and correction to the gradients."""
        for name, weight in self.weights.items() if self.anchor or self.correction else ():
            gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
            if self.anchor:
                gradient.add_(weight - self.anchor[name], alpha=self.objective.pull)
            if self.correction:
                gradient.add_(self.correction[name][: self.stacked])
            weight.grad = gradient

    @torch.no_grad()
    def retire(self, active: int) -> None:
        """Save the updates of devices from this row on, which are done.

        With padding they stay in the stack with weight 0 until they are half of it, so that there are few shapes, which
        are soon recorded.
        """
        devices, views, before = (
            self.table.index[active : self.active],
            self.layout.views(self.rows),
            self.layout.views(self.start),
        )
        for name, weight in self.weights.items() if len(devices) else ():
            views[name][devices] = weight[active : self.active] - before[name][devices]
        self.active = active
        if active < self.stacked and (not self.masks or 2 * active <= self.stacked):
            self.drop_finished()

    def drop_finished(self) -> None:
        """Remove finished devices from the stack."""
        for weight in self.weights.values():
            state = self.optimizer.state[weight]
            state.update(
                {
                    key: value[: self.active].clone()
                    for key, value in state.items()
                    if isinstance(value, Tensor) and value.shape == weight.shape
                }
            )
            weight.grad, weight.data = None, weight.data[: self.active].clone()
        self.stacked = self.active

    def losses(self) -> Tensor:
        """Mean training loss of every device over its samples, (k) float64."""
        return (self.total / self.table.samples)[self.table.back]


def channels_last(weight: Tensor) -> Tensor:
    """Convolution weights (k, out, in, height, width) in channels-last memory format; others as they are."""
    return weight.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3) if weight.dim() == 5 else weight


def concatenate_samples(records: Sequence[Records], table: StepTable) -> tuple[Batch, Tensor]:
    """Concatenate all devices' samples; also return the indices of every step's samples in the result."""
    wholes, offset, shifted = [], 0, []
    for row, one in enumerate(records):
        if one.whole is None:
            raise Unsuitable("its samples have different lengths, or are not tensors")
        wholes.append(one.whole)
        numbers = table.places[row] if one.count == len(one.data) else one.trained[table.places[row]]
        shifted.append(numbers + offset)
        offset += len(next(leaves(one.whole)))
    columns = zip(*(leaves(whole) for whole in wholes), strict=True)
    joined = iter([torch.cat(column) for column in columns])
    return map_leaves(lambda leaf: next(joined), wholes[0]), torch.stack(shifted)


def stacked_optimizer(job: Job, objective: Objective, model: nn.Module, weights: Weights) -> Optimizer:
    """The device's optimizer with stacked weights in place of the model's parameters, in the same parameter groups."""
    optimizer = local_optimizer(job, objective.local, model)
    if type(optimizer) not in (Sgd, *OPTIMIZERS):
        raise Unsuitable(f"{type(optimizer).__name__} may not be elementwise")
    names = {id(one): name for name, one in model.named_parameters()}
    for group in optimizer.param_groups:
        group["params"] = [weights[names[id(one)]] for one in group["params"]]
        # A fused step copies tensors that are not contiguous
        if (
            type(optimizer) in FUSED
            and not group.get("differentiable")
            and all(one.is_contiguous() for one in group["params"])
        ):
            group["fused"], group["foreach"] = True, False
    return optimizer
