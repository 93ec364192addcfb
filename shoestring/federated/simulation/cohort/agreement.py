"""Tests whether a simulation method gives the same updates as the plain loop, by running both on a few real devices.

The devices are cut to unequal sizes, where methods are most likely to differ: full batches, short ones, and a single
sample. Some rounds repeat the comparison with their real shapes and records (gradient_comparison.py,
update_comparison.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from shoestring.core.running import random_state
from shoestring.federated.devices.device_errors import error_kind, exceptions_alone
from shoestring.federated.devices.records import Records, generator_states
from shoestring.federated.round import Objective
from shoestring.federated.simulation.cohort.dropout import NoDropout
from shoestring.federated.simulation.cohort.hooks import HooksSeen
from shoestring.federated.simulation.cohort.job_state import JobState
from shoestring.federated.simulation.cohort.method import CohortMethod, CohortUpdates, Unsuitable
from shoestring.federated.simulation.cohort.sequential import SequentialMethod, load_device
from shoestring.federated.simulation.cohort.stacked.recording import same_numbers
from shoestring.training.memory.recompute.block_state import FrozenTensor, put_back

CLOSE = 1e-5  # largest allowed difference, relative to the norm of a device's update
EPS = torch.finfo(torch.float32).eps
STEPS = 3  # local steps in a trial
OTHER_NUMBERS = (
    "other numbers the second time, because it depends on state that can't be restored: keep such state in the model, in the "
    "loss or in a variable of its closure"
)
ATTEMPTS = 3  # each from other weights: if the last bit decides a maximum or a ReLU, one attempt says nothing


class Agreement(NamedTuple):
    reason: str = ""  # why the method can't be used; empty: it can
    draws: bool = False  # it draws other random numbers than the plain loop (dropout)
    unseen: bool = False  # even the plain loop does not repeat its own numbers


@dataclass(frozen=True)
class AgreementTrial:
    """Devices of unequal size and the plain loop's updates for them. Dropout is off during a trial, because methods
    draw other numbers."""

    plain: SequentialMethod
    devices: tuple[Records, ...]

    @cached_property
    def verdict(self) -> Agreement:
        """What holds for every method: the model leaves state behind, does not repeat its numbers, or has dropout."""
        if not self.devices:
            return Agreement("there is no device to try it on")
        if reason := leftover_state(self.plain, self.devices[0]):
            return Agreement(reason)
        if not self.repeats(self.devices[0]):
            return Agreement(f"local training gives {OTHER_NUMBERS}", unseen=True)
        if not draws_random_numbers(self.plain, self.devices[0]):
            return Agreement()
        with NoDropout():
            if draws_random_numbers(self.plain, self.devices[0]):
                return Agreement(
                    "the model draws random numbers in other places than dropout, and would draw other numbers"
                )
        return Agreement(draws=True)

    def repeats(self, device: Records) -> bool:
        """Whether training a device again gives the same bits, also after a call in between: an iterator may begin anew
        after just as many calls as a trial has steps."""
        alone = AgreementTrial(self.plain, (device,))
        first, second = alone.train_few_steps(self.plain, 0), alone.train_few_steps(self.plain, 0)
        with random_state.fork_rng():
            prepare_model(self.plain)
            forward_backward(self.plain, device)
        third = alone.train_few_steps(self.plain, 0)
        return all(same_numbers(first.rows, again.rows) for again in (second, third))

    @cached_property
    def plain_updates(self) -> list[CohortUpdates]:
        """The plain loop's updates in every attempt."""
        with NoDropout() if self.verdict.draws else nullcontext():
            return [self.train_few_steps(self.plain, attempt) for attempt in range(ATTEMPTS)]

    @exceptions_alone()
    def train_few_steps(self, method: CohortMethod, attempt: int) -> CohortUpdates:
        """Train a few steps from weights that follow from the attempt's number."""
        row, local = fresh_row(self.plain, attempt), self.plain.job.local
        some = replace(local, steps=min(local.steps or STEPS, STEPS))
        return method.train(
            row.expand(len(self.devices), -1),
            self.devices,
            Objective(some),
            [attempt + 7 * place for place in range(len(self.devices))],
        )


def agreement(method: CohortMethod, trial: AgreementTrial) -> Agreement:
    if trial.verdict.reason:
        return trial.verdict
    right, apart = trial.plain_updates, float("inf")
    with NoDropout() if trial.verdict.draws else nullcontext():
        try:
            for attempt, one in enumerate(right):
                if not apart <= CLOSE:
                    apart = distance(trial.train_few_steps(method, attempt), one, fresh_row(trial.plain, attempt))
        except Unsuitable as why:
            return Agreement(str(why))
        except Exception as error:  # anything in a model that can't be done for several devices at once
            return Agreement(error_kind(error))
    if not apart <= CLOSE:
        return Agreement(f"its updates differ from the plain loop's by {apart:.1g} of their size")
    return trial.verdict


def make_trial(plain: SequentialMethod, devices: Sequence[Records]) -> AgreementTrial:
    """A trial on those devices that the plain loop can train (a batch norm, for example, can't train on a single
    sample)."""
    found, failed = [], None
    for one in cut_to_unequal_sizes(devices, plain.job.local.batch):
        try:
            AgreementTrial(plain, (one,)).train_few_steps(plain, 0)
            found.append(one)
        except Exception as error:
            failed = error
    if failed is not None and not found:
        raise failed
    return AgreementTrial(plain, tuple(found))


def cut_to_unequal_sizes(devices: Sequence[Records], batch: int) -> list[Records]:
    """Cut devices to two and a half batches, one batch plus a sample, less than one, one sample, and two batches."""
    found = []
    for place, times in enumerate((2.5, 1.0, 0.7, 0.0, 2.0, 0.4) if devices else ()):
        whole = devices[place % len(devices)]
        size = int(times * (batch or whole.count / 2.5)) + place % 2
        size = min(max(size, 1), whole.count)
        begin = (whole.count - size) * place // 6  # other samples for every cut
        found.append(replace(whole, trained=whole.trained[begin : begin + size]))
    return found


def fresh_row(plain: SequentialMethod, attempt: int) -> Tensor:
    """The row of a new model, initialised with the attempt's number as seed."""
    with random_state.fork_rng():
        random_state.seed(attempt)
        return plain.layout.row(plain.job.model())


def forward_backward(plain: SequentialMethod, records: Records) -> None:
    """One forward and backward on the first samples, as in training."""
    batch = records.batch(records.trained[: max(plain.job.local.batch, 2)])
    plain.job.loss(plain.job.forward(plain.model, batch), batch).backward()
    plain.model.zero_grad(set_to_none=True)


def prepare_model(plain: SequentialMethod) -> None:
    """Put the model into the state in which a device's training begins."""
    load_device(plain.layout, plain.model, plain.layout.row(plain.model), plain.outside)
    plain.model.train()


def leftover_state(plain: SequentialMethod, records: Records) -> str:
    """Why the model can't be trained for many devices at once: its steps change hidden state, or put hooks on tensors.
    Empty if neither."""
    with random_state.fork_rng():
        prepare_model(plain)
        with HooksSeen() as hooks:
            forward_backward(plain, records)
        weights = [FrozenTensor(one, True, name) for name, one in plain.model.named_parameters()]
        before = JobState(plain.job, plain.model).picture()
        forward_backward(plain, records)
        kept = not all(one.same() for one in before)
        put_back(plain.outside.picture)
    if hooks.some:
        return "its forward puts a hook on a tensor, which would not be called for many devices at once"
    if not all(one.same() for one in weights):
        return "its forward changes its own weights"
    if kept:
        return "the model or the loss keeps state from one call to the next, and many devices at once would make other calls"
    return ""


def draws_random_numbers(plain: SequentialMethod, records: Records) -> bool:
    """Whether a step draws random numbers from torch, NumPy or Python."""
    with random_state.fork_rng():
        prepare_model(plain)
        before = generator_states()
        forward_backward(plain, records)
        put_back(plain.outside.picture)
        return before != generator_states()


def distance(found: CohortUpdates, right: CohortUpdates, start: Tensor) -> float:
    """The largest |difference| / |update| over devices, after subtracting the plain loop's own rounding.

    The plain loop rounds every weight in every step by up to EPS / 2. If updates are small compared to weights,
    rounding dominates.
    """
    apart, size = (found.rows - right.rows).norm(dim=1), right.rows.norm(dim=1)
    rounded = EPS * start.norm() * right.steps
    return float(((apart - rounded).clamp_min(0) / size.clamp_min(torch.finfo(torch.float32).tiny)).max())
