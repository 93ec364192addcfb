"""One device after the other, in plain PyTorch: the definition of a device's work, which every other way must agree with.

w  <-  w - step of the optimizer along  (gradient of the batch's loss  +  pull (w - anchor)  +  correction)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoestring.core import random_state
from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.core.local import Local
from shoestring.core.optimizer import made_optimizer
from shoestring.core.seams import calls_user
from shoestring.federated.layout import Layout, tensors_of
from shoestring.federated.local_steps import schedule_steps
from shoestring.federated.records import Records
from shoestring.federated.round import Objective
from shoestring.federated.simulation.cohort.kept_state import JobState
from shoestring.federated.simulation.cohort.schedule import batches, step_sizes
from shoestring.federated.simulation.cohort.sgd import Optimizer, Sgd
from shoestring.federated.simulation.cohort.way import Moved
from shoestring.federated.statistics import train_mode
from shoestring.runs.initial_weights import fresh_model
from shoestring.training.memory.block_state import Frozen, TooLarge, put_back


class Beside(NamedTuple):
    """What a job has beside its model's row, as it was made."""

    tensors: dict[str, Tensor]  # counters of a batch norm, frozen weights
    # What model, forward, loss and metrics keep from one call to the next: attributes, lists, generators
    picture: list[Frozen]


@dataclass(frozen=True)
class SequentialMethod:
    job: Job
    layout: Layout
    model: nn.Module
    beside: Beside

    def moved(self, start: Tensor, records: Sequence[Records], objective: Objective, seeds: Sequence[int]) -> Moved:
        rows = torch.empty(len(records), self.layout.size)
        losses, steps = torch.zeros(len(records), dtype=torch.float64), torch.zeros(len(records), dtype=torch.long)
        try:
            for place, (one, seed) in enumerate(zip(records, seeds, strict=True)):
                load(self.layout, self.model, start[place], self.beside)
                pulled = pull_of(self.layout, self.model, objective, place)
                # What a model draws follows from the device's seed, so it is the same whoever worked before
                with random_state.kept():
                    random_state.seed(seed)
                    losses[place], steps[place] = self.worked(one, objective.local, pulled, seed)
                torch.sub(self.layout.row(self.model), start[place], out=rows[place])
        finally:
            with suppress(TooLarge):  # the next device that is loaded says so
                # The loss is the job's own object: whoever uses it next finds it as it was.
                put_back(self.beside.picture)
        return Moved(rows, losses, steps)

    @calls_user("model, loss or optimizer")
    def worked(self, records: Records, local: Local, pulled: Callable[[], None], seed: int) -> tuple[float, int]:
        """The work of one device on the model as it is: its mean loss and its steps."""
        train_mode(self.model, local)
        optimizer, sizes = local_optimizer(self.job, local, self.model), step_sizes(records.count, local)
        scheduled = schedule_steps(self.job, local, optimizer, len(sizes), -(-records.count // sizes[0]))
        total, samples, steps = 0.0, 0, 0
        for places in batches(records.count, local, seed):
            batch = records.batch(records.trained[places])
            optimizer.zero_grad(set_to_none=True)
            loss = self.job.loss(self.job.forward(self.model, batch), batch)
            loss.backward()
            pulled()
            if local.clip:
                nn.utils.clip_grad_norm_(self.model.parameters(), local.clip)
            optimizer.step()
            total, samples, steps = total + loss.item() * len(places), samples + len(places), steps + 1
            scheduled(steps)
        optimizer.zero_grad(set_to_none=True)
        return total / max(samples, 1), steps


def made_model(job: Job) -> nn.Module:
    """The job's model as every device has it: what is in no row, such as frozen weights, follows from the job and its seed, too. Devices
    are simulated on the CPU."""
    with random_state.kept():
        return fresh_model(job).cpu().train()


def sequential(job: Job, layout: Layout, model: nn.Module) -> SequentialMethod:
    return SequentialMethod(job, layout, model, beside_row(job, layout, model))


def beside_row(job: Job, layout: Layout, model: nn.Module) -> Beside:
    """A copy of what is in no row: it is the same for every device."""
    inside = {entry.name for entry in layout.entries}
    return Beside(
        {name: one.detach().clone() for name, one in tensors_of(model).items() if name not in inside},
        JobState(job, model).picture(),
    )


def load(layout: Layout, model: nn.Module, row: Tensor, beside: Beside) -> None:
    """Make a model what it is on a device that begins: with this row, and all else as it was made."""
    try:
        put_back(beside.picture)
    except TooLarge as why:
        raise Mistake(
            "the job's forward or loss changes a tensor of more than 1 MiB in place, and keeps it from one call to the next, so "
            "it can't begin anew with every device: keep it as a buffer of a module"
        ) from why
    layout.load(model, row)
    found = tensors_of(model)
    with torch.no_grad():
        for name, value in beside.tensors.items():
            found[name].copy_(value)


def local_optimizer(job: Job, local: Local, model: nn.Module) -> Optimizer:
    """A new optimizer for one device's work."""
    if local.optimizer is None and local.schedule is not None:
        return torch.optim.SGD((one for one in model.parameters() if one.requires_grad), lr=local.rate)
    if local.optimizer is None:
        return Sgd((one for one in model.parameters() if one.requires_grad), local.rate)
    return made_optimizer(replace(job, optimizer=local.optimizer), model)


def pull_of(layout: Layout, model: nn.Module, objective: Objective, place: int) -> Callable[[], None]:
    """Adds to the model's gradients what the objective has beside the loss."""
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
    def pulled() -> None:
        for weight, anchor, correction in added:
            gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
            if anchor is not None:
                gradient.add_(weight - anchor, alpha=objective.pull)
            if correction is not None:
                gradient.add_(correction)
            weight.grad = gradient

    return pulled
