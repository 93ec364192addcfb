"""Many devices' models in one forward and one backward: their weights stacked, (k, ...) each, and an elementwise optimizer on the stacks.

The losses of devices do not depend on each other's weights, so the gradient of their sum is every device's own:

    d (loss_1 + ... + loss_k) / d W_i  =  d loss_i / d W_i

Autograd runs once for all of them. How a model is called with stacked weights is said elsewhere: grids.py for images, vmapped.py for all
else. In a step in which some devices have fewer samples than others, devices with as many samples each are called together: that is right
for every loss. Where the loss is the cross entropy of one class a sample, which we write ourselves, and samples do not see each other,
short batches are filled up instead, and what fills up has no share of the loss: one call for all.

In some rounds, one device of every shape is compared with the plain loop, step by step, because no trial before the first round knows
what shapes and records there will be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.core import random_state
from shoestring.core.batch import Batch, leaves, mapped
from shoestring.core.job import Job, default_loss
from shoestring.federated.layout import Layout
from shoestring.federated.records import Records
from shoestring.federated.round import Objective
from shoestring.federated.seeds import seed_of
from shoestring.federated.simulation.cohort.comparison import GradientComparison
from shoestring.federated.simulation.cohort.packed import PackedRows, packed
from shoestring.federated.simulation.cohort.recorded import Gradients, Weights, laid_out_like
from shoestring.federated.simulation.cohort.sequential import SequentialMethod, load, local_optimizer
from shoestring.federated.simulation.cohort.sgd import Optimizer, Sgd
from shoestring.federated.simulation.cohort.way import Moved, Unsuitable, check_steps

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
)  # they treat every number by itself
FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


@dataclass(frozen=True)
class StackedMethod:
    plain: SequentialMethod
    outputs: Outputs
    masks: bool = False  # short batches are filled up, where the loss is the cross entropy of one class a sample
    whole: Callable[[Weights, Batch], Tensor] | None = (
        None  # (k): devices' losses at once, where batches are not filled up
    )
    draws: bool = False  # the model has dropout

    @cached_property
    def gradients(self) -> Gradients:
        return Gradients(self.losses, self.plain.model)

    @cached_property
    def gradients_of_classes(self) -> Gradients:
        """The same where targets are one class a sample, none of which is left out, and the loss is their cross entropy."""
        return Gradients(
            lambda weights, batch, shares: self.losses(weights, batch, shares, classes=True), self.plain.model
        )

    def losses(self, weights: Weights, batch: Batch, shares: Tensor | None, classes: bool = False) -> Tensor:
        """(k): every device's loss. `shares`, (k, batch), only of classes: of every sample in it; None: all are alike."""
        if self.whole is not None and not classes:
            return self.whole(weights, batch)
        found = self.outputs(weights, batch)
        if classes and isinstance(found, Tensor) and found.dim() == 3:
            each = nn.functional.cross_entropy(found.flatten(0, 1), batch[1].flatten(), reduction="none").view(
                found.shape[:2]
            )
            return each.mean(1) if shares is None else (each * shares).sum(1)
        if shares is not None:
            raise Unsuitable("its outputs are not a row of numbers a sample, so short batches can't be filled up")
        return torch.func.vmap(self.plain.job.loss, randomness="different")(found, batch)

    def moved(
        self,
        start: Tensor,
        records: Sequence[Records],
        objective: Objective,
        seeds: Sequence[int],
        checks: bool = False,
    ) -> Moved:
        """`checks`: compare with the plain loop on the way; what is not as there is told by raising Differs."""
        check_steps(objective.local)
        layout, model = self.plain.layout, self.plain.model
        table = packed([one.count for one in records], objective.local, seeds)
        load(layout, model, start[0], self.plain.beside)  # what is in no row is as it was made
        model.train()
        with random_state.kept():
            random_state.seed(seed_of("chunk", *seeds))  # what the models draw, they draw together
            steps = StackedSteps(self, table, start, [records[one] for one in table.order], objective, checks)
            for step in range(table.steps[0]):
                steps.take(step)
        steps.rest(0)
        return Moved(steps.rows, steps.losses(), torch.tensor(table.steps)[table.back])


def of_classes(data: Batch) -> bool:
    """Whether all targets are one class a sample, none of which is left out."""
    return (
        isinstance(data, (tuple, list))
        and len(data) > 1
        and isinstance(data[1], Tensor)
        and data[1].dtype == torch.long
        and data[1].dim() == 1
        and int(data[1].min()) >= 0
    )


class StackedSteps:
    """The steps of a chunk's devices, in the order of `table`."""

    def __init__(
        self,
        way: StackedMethod,
        table: PackedRows,
        start: Tensor,
        records: Sequence[Records],
        objective: Objective,
        checks: bool = False,
    ) -> None:
        self.way, self.table, self.start, self.objective = way, table, start, objective
        self.layout, self.stacked, self.active = (
            way.plain.layout,
            len(records),
            len(records),
        )  # rows of the stack; those still at work
        self.rows = torch.empty(len(records), self.layout.size)
        self.total = torch.zeros(len(records), dtype=torch.float64)
        self.data, self.places = gathered(records, table)
        self.sizes = (table.shares > 0).sum(2)  # (k, steps): samples
        classes = way.plain.job.loss is default_loss and of_classes(self.data)
        self.gradients = way.gradients_of_classes if classes else way.gradients
        self.masks = way.masks and classes
        self.comparison = GradientComparison(way.plain, self.gradients, way.draws) if checks else None
        self.weights = {name: channels_last(view[table.index]) for name, view in self.layout.views(start).items()}
        self.optimizer = stacked_optimizer(way.plain.job, objective, way.plain.model, self.weights)
        trained = Layout(tuple(entry for entry in self.layout.entries if entry.trained))
        self.anchor = (
            {} if not objective.pull or objective.anchor is None else trained.views(objective.anchor[: trained.size])
        )
        self.correction = {} if objective.correction is None else trained.views(objective.correction[table.index])

    @torch.no_grad()
    def take(self, step: int) -> None:
        self.rest(self.table.active(step))
        self.optimizer.zero_grad(set_to_none=True)
        sizes = self.sizes[: self.stacked, step]  # 0: it is done
        if bool((sizes == sizes[0]).all()):
            self.learn(None, step, int(sizes[0]))
        elif self.masks:
            self.learn(None, step, self.table.batch, self.table.shares[: self.stacked, step])
        else:
            for size in sizes.unique().tolist():
                self.learn((sizes == size).nonzero().squeeze(1), step, size)
        self.pull()
        self.optimizer.step()

    def learn(self, some: Tensor | None, step: int, size: int, shares: Tensor | None = None) -> None:
        """Find the gradients of some devices; None: of the whole stack."""
        rows = slice(0, self.stacked) if some is None else some
        places = self.places[rows, step, :size]
        weights = (
            self.weights if some is None else {name: one.index_select(0, some) for name, one in self.weights.items()}
        )
        counts = self.sizes[rows, step]
        if self.comparison is not None:
            self.comparison.check(weights, lambda: mapped(lambda leaf: leaf[places], self.data), shares, counts)
        losses, gradients = self.gradients(weights, mapped(lambda leaf: leaf[places], self.data), shares)
        self.total[rows] += torch.where(counts > 0, losses.double() * counts, 0.0)  # who is done may be anywhere
        for weight, gradient in zip(self.weights.values(), gradients, strict=True):
            if gradient is not None and some is None:
                weight.grad = laid_out_like(weight, gradient)
            elif gradient is not None:
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
                weight.grad[some] = gradient

    @torch.no_grad()
    def pull(self) -> None:
        """What the objective has beside the loss."""
        for name, weight in self.weights.items() if self.anchor or self.correction else ():
            gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
            if self.anchor:
                gradient.add_(weight - self.anchor[name], alpha=self.objective.pull)
            if self.correction:
                gradient.add_(self.correction[name][: self.stacked])
            weight.grad = gradient

    @torch.no_grad()
    def rest(self, active: int) -> None:
        """Devices from this row on are done: keep what they found. Where batches are filled up, they stay in the stack, without a share,
        until they are half of it: so there are few shapes, which are soon recorded."""
        devices, views, before = (
            self.table.index[active : self.active],
            self.layout.views(self.rows),
            self.layout.views(self.start),
        )
        for name, weight in self.weights.items() if len(devices) else ():
            views[name][devices] = weight[active : self.active] - before[name][devices]
        self.active = active
        if active < self.stacked and (not self.masks or 2 * active <= self.stacked):
            self.shorten()

    def shorten(self) -> None:
        """Go on without those that are done."""
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
        """(k) float64: of every device, the mean over its samples."""
        return (self.total / self.table.samples)[self.table.back]


def channels_last(weight: Tensor) -> Tensor:
    """Convolutions' weights, (k, out, in, height, width), as their kernels want them in memory; others as they are."""
    return weight.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3) if weight.dim() == 5 else weight


def gathered(records: Sequence[Records], table: PackedRows) -> tuple[Batch, Tensor]:
    """All devices' samples one after the other, and the places of every step's samples in them."""
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
    return mapped(lambda leaf: next(joined), wholes[0]), torch.stack(shifted)


def stacked_optimizer(job: Job, objective: Objective, model: nn.Module, weights: Weights) -> Optimizer:
    """The device's optimizer, with stacked weights in the place of the model's: its groups are those that it made of one model."""
    optimizer = local_optimizer(job, objective.local, model)
    if type(optimizer) not in (Sgd, *OPTIMIZERS):
        raise Unsuitable(f"{type(optimizer).__name__} may treat the numbers of a weight together")
    names = {id(one): name for name, one in model.named_parameters()}
    for group in optimizer.param_groups:
        group["params"] = [weights[names[id(one)]] for one in group["params"]]
        # A fused step copies what does not lie in its usual order
        if (
            type(optimizer) in FUSED
            and not group.get("differentiable")
            and all(one.is_contiguous() for one in group["params"])
        ):
            group["fused"], group["foreach"] = True, False
    return optimizer
