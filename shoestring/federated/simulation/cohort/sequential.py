"""The sequential method: one device after the other in plain PyTorch. It defines local training; other methods must
agree with it.

w  <-  w - step of the optimizer along  (gradient of the batch's loss  +  pull (w - anchor)  +  correction)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoestring.core.clients.local import Local
from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.core.optimization.optimizer import make_optimizer
from shoestring.core.running import random_state
from shoestring.core.user_code.seams import calls_user
from shoestring.federated.devices.local_steps import schedule_steps
from shoestring.federated.devices.records import Records
from shoestring.federated.model.layout import Layout, named_tensors
from shoestring.federated.model.statistics import train_mode
from shoestring.federated.round import Objective
from shoestring.federated.simulation.cohort.job_state import JobState
from shoestring.federated.simulation.cohort.method import CohortUpdates
from shoestring.federated.simulation.cohort.schedule import batches, step_sizes
from shoestring.federated.simulation.cohort.sgd import Optimizer, Sgd
from shoestring.runs.weights.initial_weights import fresh_model
from shoestring.training.memory.recompute.block_state import Frozen, TooLarge, put_back


class StateOutsideRow(NamedTuple):
    """The job's initial state that is not part of a row. It is restored before every device."""

    tensors: dict[str, Tensor]  # counters of a batch norm, frozen weights
    # State that model, forward, loss and metrics keep between calls: attributes, lists, generators
    picture: list[Frozen]


@dataclass(frozen=True)
class SequentialMethod:
    job: Job
    layout: Layout
    model: nn.Module
    outside: StateOutsideRow

    def train(
        self, start: Tensor, records: Sequence[Records], objective: Objective, seeds: Sequence[int]
    ) -> CohortUpdates:
        rows = torch.empty(len(records), self.layout.size)
        losses, steps = torch.zeros(len(records), dtype=torch.float64), torch.zeros(len(records), dtype=torch.long)
        try:
            for place, (one, seed) in enumerate(zip(records, seeds, strict=True)):
                load_device(self.layout, self.model, start[place], self.outside)
                add_gradients = objective_gradients(self.layout, self.model, objective, place)
                # The model's random numbers follow from the device's seed, not from the devices before it
                with random_state.fork_rng():
                    random_state.seed(seed)
                    losses[place], steps[place] = self.train_one(one, objective.local, add_gradients, seed)
                torch.sub(self.layout.row(self.model), start[place], out=rows[place])
        finally:
            with suppress(TooLarge):  # `load_device` reports it for the next device
                # The loss is the user's object: leave it as it was
                put_back(self.outside.picture)
        return CohortUpdates(rows, losses, steps)

    @calls_user("model, loss or optimizer")
    def train_one(
        self, records: Records, local: Local, add_gradients: Callable[[], None], seed: int
    ) -> tuple[float, int]:
        """Train the loaded model on one device's records; return the mean loss and the number of steps."""
        train_mode(self.model, local)
        optimizer, sizes = local_optimizer(self.job, local, self.model), step_sizes(records.count, local)
        scheduled = schedule_steps(self.job, local, optimizer, len(sizes), -(-records.count // sizes[0]))
        total, samples, steps = 0.0, 0, 0
        for places in batches(records.count, local, seed):
            batch = records.batch(records.trained[places])
            optimizer.zero_grad(set_to_none=True)
            loss = self.job.loss(self.job.forward(self.model, batch), batch)
            loss.backward()
            add_gradients()
            if local.clip:
                nn.utils.clip_grad_norm_(self.model.parameters(), local.clip)
            optimizer.step()
            total, samples, steps = total + loss.item() * len(places), samples + len(places), steps + 1
            scheduled(steps)
        optimizer.zero_grad(set_to_none=True)
        return total / max(samples, 1), steps


def make_model(job: Job) -> nn.Module:
    """The job's model, in training mode on the CPU. Frozen weights and other state outside of the row follow from the
    job and its seed."""
    with random_state.fork_rng():
        return fresh_model(job).cpu().train()


def sequential_method(job: Job, layout: Layout, model: nn.Module) -> SequentialMethod:
    return SequentialMethod(job, layout, model, state_outside_row(job, layout, model))


def state_outside_row(job: Job, layout: Layout, model: nn.Module) -> StateOutsideRow:
    """A copy of the state that is not part of a row: it is the same for every device."""
    inside = {entry.name for entry in layout.entries}
    return StateOutsideRow(
        {name: one.detach().clone() for name, one in named_tensors(model).items() if name not in inside},
        JobState(job, model).picture(),
    )


def load_device(layout: Layout, model: nn.Module, row: Tensor, outside: StateOutsideRow) -> None:
    """Load a row into the model and restore all other state, as at the beginning of a device's training."""
    try:
        put_back(outside.picture)
    except TooLarge as why:
        raise Mistake(
            "the job's forward or loss changes a tensor of more than 1 MiB in place and keeps it between calls, so it can't be "
            "restored for every device: keep it as a buffer of a module"
        ) from why
    layout.load(model, row)
    found = named_tensors(model)
    with torch.no_grad():
        for name, value in outside.tensors.items():
            found[name].copy_(value)


def local_optimizer(job: Job, local: Local, model: nn.Module) -> Optimizer:
    """A new optimizer for one device's local training."""
    if local.optimizer is None and local.schedule is not None:
        return torch.optim.SGD((one for one in model.parameters() if one.requires_grad), lr=local.rate)
    if local.optimizer is None:
        return Sgd((one for one in model.parameters() if one.requires_grad), local.rate)
    return make_optimizer(replace(job, optimizer=local.optimizer), model)


def objective_gradients(layout: Layout, model: nn.Module, objective: Objective, place: int) -> Callable[[], None]:
    """A function that adds the objective's pull and correction to the model's gradients. `place`: the device's row."""
    if not objective.pull and objective.correction is None:
        return lambda: None
    weights = {name: one for name, one in model.named_parameters() if one.requires_grad}
    added: list[tuple[nn.Parameter, Tensor | None, Tensor | None]] = []
    for entry in layout.entries:
        if entry.trained:
            inside = slice(entry.start, entry.stop)
            anchor = (
                None if objective.anchor is None or not objective.pull else objective.anchor[inside].view(entry.shape)
            )
            correction = None if objective.correction is None else objective.correction[place, inside].view(entry.shape)
            added.append((weights[entry.name], anchor, correction))

    @torch.no_grad()
    def add_gradients() -> None:
        for weight, anchor, correction in added:
            gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
            if anchor is not None:
                gradient.add_(weight - anchor, alpha=objective.pull)
            if correction is not None:
                gradient.add_(correction)
            weight.grad = gradient

    return add_gradients
