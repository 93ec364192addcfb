"""Many devices' models in one forward and one backward: their weights stacked, (k, ...) each, and an elementwise optimizer on the stacks.

The losses of devices do not depend on each other's weights, so the gradient of their sum is every device's own:

    d (loss_1 + ... + loss_k) / d W_i  =  d loss_i / d W_i

Autograd runs once for all of them. `forward` says how a model is called with stacked weights: grids.py for images, vmap for all else.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoestring.core import random_state
from shoestring.core.batch import Batch, leaves, mapped
from shoestring.core.job import Job
from shoestring.federated.cohort.packed import Packed, packed
from shoestring.federated.cohort.sequential import Sequential, load, local_optimizer
from shoestring.federated.cohort.way import Moved, Unsuitable
from shoestring.federated.layout import Layout
from shoestring.federated.records import Records
from shoestring.federated.round import Objective
from shoestring.federated.seeds import seed_of

Weights = dict[str, Tensor]                       # (k, ...) each, by name
Forward = Callable[[Weights, Batch], Tensor]      # (k) losses; the batch's tensors are (k, batch, ...)

OPTIMIZERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam,
              torch.optim.RAdam, torch.optim.Adadelta, torch.optim.Adamax)   # they treat every number by itself
FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


@dataclass(frozen=True)
class Stacked:
    plain: Sequential
    forward: Forward

    def moved(self, start: Tensor, records: Sequence[Records], objective: Objective, seeds: Sequence[int]) -> Moved:
        layout, model = self.plain.layout, self.plain.model
        table = packed([one.count for one in records], objective.local, seeds)
        load(layout, model, start[0], self.plain.beside)   # what is in no row is as it was made
        model.train()
        with random_state.kept():
            random_state.seed(seed_of("chunk", *seeds))    # what the models draw, they draw together
            steps = Steps(self, table, start, [records[one] for one in table.order], objective)
            for step in range(table.steps[0]):
                steps.take(step)
        steps.rest(0)
        return Moved(steps.rows, steps.losses(), torch.tensor(table.steps)[table.back])


class Steps:
    """The steps of a chunk's devices, in the order of `table`."""

    def __init__(self, way: Stacked, table: Packed, start: Tensor, records: Sequence[Records], objective: Objective) -> None:
        self.way, self.table, self.start, self.objective = way, table, start, objective
        self.layout, self.active = way.plain.layout, len(records)
        self.rows = torch.empty(len(records), self.layout.size)
        self.total = torch.zeros(len(records), dtype=torch.float64)
        self.data, self.places = gathered(records, table)
        self.sizes = (table.shares > 0).sum(2)                                    # (k, steps): samples
        self.weights = {name: view[table.index].requires_grad_() for name, view in self.layout.views(start).items()}
        self.optimizer = stacked_optimizer(way.plain.job, objective, way.plain.model, self.weights)
        trained = Layout(tuple(entry for entry in self.layout.entries if entry.trained))
        self.anchor = {} if not objective.pull or objective.anchor is None else trained.views(objective.anchor[:trained.size])
        self.correction = {} if objective.correction is None else trained.views(objective.correction[table.index])

    def take(self, step: int) -> None:
        self.rest(self.table.active(step))
        self.optimizer.zero_grad(set_to_none=True)
        sizes = self.sizes[:self.active, step]
        for size in sizes.unique().tolist():
            some = (sizes == size).nonzero().squeeze(1)
            every = len(some) == self.active
            weights = self.weights if every else {name: one.index_select(0, some) for name, one in self.weights.items()}
            batch = mapped(lambda leaf: leaf[self.places[some, step, :size]], self.data)   # noqa: B023  (called at once)
            losses = self.way.forward(weights, batch)
            losses.sum().backward()
            self.total[some] += losses.detach().double() * size
        self.pull()
        self.optimizer.step()

    @torch.no_grad()
    def pull(self) -> None:
        """What the objective has beside the loss."""
        for name, weight in self.weights.items() if self.anchor or self.correction else ():
            gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
            if self.anchor:
                gradient.add_(weight - self.anchor[name], alpha=self.objective.pull)
            if self.correction:
                gradient.add_(self.correction[name][:self.active])
            weight.grad = gradient

    @torch.no_grad()
    def rest(self, active: int) -> None:
        """Devices from this row on are done: keep what they found, and go on without them."""
        if active == self.active:
            return
        devices, views, before = self.table.index[active:self.active], self.layout.views(self.rows), self.layout.views(self.start)
        for name, weight in self.weights.items():
            views[name][devices] = weight[active:] - before[name][devices]
            state = self.optimizer.state[weight]
            state.update({key: value[:active].clone() for key, value in state.items()
                          if isinstance(value, Tensor) and value.shape == weight.shape})
            weight.grad, weight.data = None, weight.data[:active].clone()
        self.active = active

    def losses(self) -> Tensor:
        """(k) float64: of every device, the mean over its samples."""
        return (self.total / self.table.samples)[self.table.back]


def gathered(records: Sequence[Records], table: Packed) -> tuple[Batch, Tensor]:
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


def stacked_optimizer(job: Job, objective: Objective, model: nn.Module, weights: Weights) -> torch.optim.Optimizer:
    """The device's optimizer, with stacked weights in the place of the model's: its groups are those that it made of one model."""
    optimizer = local_optimizer(job, objective.local, model)
    if type(optimizer) not in OPTIMIZERS:
        raise Unsuitable(f"{type(optimizer).__name__} may treat the numbers of a weight together")
    names = {id(one): name for name, one in model.named_parameters()}
    for group in optimizer.param_groups:
        group["params"] = [weights[names[id(one)]] for one in group["params"]]
        if type(optimizer) in FUSED and not group.get("differentiable"):
            group["fused"], group["foreach"] = True, False
    return optimizer
