"""Whether a way of training gives what the plain loop does, by trying both on a few real devices.

The devices are cut to unequal sizes, because that is where ways differ: batches that are full, short, and one sample. What is tried here
is tried again while devices work (stacked.py), on the shapes and the records that a round really has.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from shoestring.core import random_state
from shoestring.federated.device_errors import kind_of
from shoestring.federated.records import Records, drawn_so_far
from shoestring.federated.round import Objective
from shoestring.federated.simulation.cohort.dropout import NoDropout
from shoestring.federated.simulation.cohort.hooks import HooksSeen
from shoestring.federated.simulation.cohort.kept_state import JobState
from shoestring.federated.simulation.cohort.sequential import SequentialMethod, load
from shoestring.federated.simulation.cohort.way import CohortMethod, Moved, Unsuitable
from shoestring.training.memory.block_state import FrozenTensor, put_back

CLOSE = 1e-5  # largest difference, relative to the size of a device's update
EPS = torch.finfo(torch.float32).eps
STEPS = 3  # of every device that are tried
OTHER_NUMBERS = (
    "other numbers the second time, because something steers it that can't be put back: keep it in the model, in the loss "
    "or in a variable of its closure"
)
ATTEMPTS = 3  # from other weights: where a maximum or a ReLU is decided by the last bit, one attempt says nothing


class Agreement(NamedTuple):
    reason: str = ""  # why the way can't be used; empty: it can
    draws: bool = False  # it draws other random numbers than the plain loop
    unseen: bool = False  # the plain loop itself finds other numbers the second time


@dataclass(frozen=True)
class AgreementTrial:
    """Devices of unequal size, and what the plain loop makes of them. Models with dropout are compared without it, because two ways that
    draw differently can't be compared otherwise."""

    plain: SequentialMethod
    devices: tuple[Records, ...]

    @cached_property
    def said(self) -> Agreement:
        """What can be said of the model before any way is tried."""
        if not self.devices:
            return Agreement("there is no device to try it on")
        if reason := trace_of(self.plain, self.devices[0]):
            return Agreement(reason)
        if not self.repeats(self.devices[0]):
            return Agreement(f"its work finds {OTHER_NUMBERS}", unseen=True)
        if not draws(self.plain, self.devices[0]):
            return Agreement()
        with NoDropout():
            if draws(self.plain, self.devices[0]):
                return Agreement("the model draws random numbers otherwise than by dropout, and would draw others")
        return Agreement(draws=True)

    def repeats(self, device: Records) -> bool:
        """Whether a device's work is the same bits the second time."""
        alone = AgreementTrial(self.plain, (device,))
        first, second = alone.tried(self.plain, 0), alone.tried(self.plain, 0)
        return bool(((first.rows == second.rows) | (first.rows.isnan() & second.rows.isnan())).all())

    @cached_property
    def right(self) -> list[Moved]:
        """What the plain loop gives, of every attempt."""
        with NoDropout() if self.said.draws else nullcontext():
            return [self.tried(self.plain, attempt) for attempt in range(ATTEMPTS)]

    def tried(self, way: CohortMethod, attempt: int) -> Moved:
        """A few steps from weights that follow from the attempt's number."""
        row, local = begun(self.plain, attempt), self.plain.job.local
        some = replace(local, steps=min(local.steps or STEPS, STEPS))
        return way.moved(
            row.expand(len(self.devices), -1),
            self.devices,
            Objective(some),
            [attempt + 7 * place for place in range(len(self.devices))],
        )


def agreement(way: CohortMethod, trial: AgreementTrial) -> Agreement:
    if trial.said.reason:
        return trial.said
    right, apart = trial.right, float("inf")
    with NoDropout() if trial.said.draws else nullcontext():
        try:
            for attempt, one in enumerate(right):
                if not apart <= CLOSE:
                    apart = distance(trial.tried(way, attempt), one, begun(trial.plain, attempt))
        except Unsuitable as why:
            return Agreement(str(why))
        except Exception as error:  # whatever a model does that can't be done for several at once
            return Agreement(kind_of(error))
    if not apart <= CLOSE:
        return Agreement(f"its updates differ from the plain loop's by {apart:.1g} of their size")
    return trial.said


def trial_of(plain: SequentialMethod, devices: Sequence[Records]) -> AgreementTrial:
    """Of devices that the plain loop can train: a batch norm, say, can't be trained on one sample."""
    found, failed = [], None
    for one in unequal(devices, plain.job.local.batch):
        try:
            AgreementTrial(plain, (one,)).tried(plain, 0)
            found.append(one)
        except Exception as error:
            failed = error
    if failed is not None and not found:
        raise failed
    return AgreementTrial(plain, tuple(found))


def unequal(devices: Sequence[Records], batch: int) -> list[Records]:
    """Devices cut to two and a half batches, one and a sample, less than one, one sample, and two batches."""
    found = []
    for place, times in enumerate((2.5, 1.0, 0.7, 0.0, 2.0, 0.4) if devices else ()):
        whole = devices[place % len(devices)]
        size = int(times * (batch or whole.count / 2.5)) + place % 2
        size = min(max(size, 1), whole.count)
        begin = (whole.count - size) * place // 6  # other samples each time
        found.append(replace(whole, trained=whole.trained[begin : begin + size]))
    return found


def begun(plain: SequentialMethod, attempt: int) -> Tensor:
    with random_state.kept():
        random_state.seed(attempt)
        return plain.layout.row(plain.job.model())


def learn(plain: SequentialMethod, records: Records) -> None:
    """A forward and a backward in training."""
    batch = records.batch(records.trained[: max(plain.job.local.batch, 2)])
    plain.job.loss(plain.job.forward(plain.model, batch), batch).backward()
    plain.model.zero_grad(set_to_none=True)


def begin(plain: SequentialMethod) -> None:
    load(plain.layout, plain.model, plain.layout.row(plain.model), plain.beside)
    plain.model.train()


def trace_of(plain: SequentialMethod, records: Records) -> str:
    """What a second step leaves behind that the first did not, or a hook that it puts on a tensor; empty: neither."""
    with random_state.kept():
        begin(plain)
        with HooksSeen() as hooks:
            learn(plain, records)
        weights = [FrozenTensor(one, True, name) for name, one in plain.model.named_parameters()]
        before = JobState(plain.job, plain.model).picture()
        learn(plain, records)
        kept = not all(one.same() for one in before)
        put_back(plain.beside.picture)
    if hooks.some:
        return "its forward puts a hook on a tensor, which many devices at once would not call"
    if not all(one.same() for one in weights):
        return "its forward changes its own weights"
    if kept:
        return "the model or the loss keeps something from one call to the next, and many devices at once would make other calls"
    return ""


def draws(plain: SequentialMethod, records: Records) -> bool:
    """Whether a step draws random numbers: torch's, NumPy's or Python's."""
    with random_state.kept():
        begin(plain)
        before = drawn_so_far()
        learn(plain, records)
        put_back(plain.beside.picture)
        return before != drawn_so_far()


def distance(found: Moved, right: Moved, start: Tensor) -> float:
    """The largest of all devices' |difference| / |update|, beyond what the plain loop itself rounds.

    It rounds its weights in every step, by up to half of EPS of each; where updates are small against weights, that is all one sees.
    """
    apart, size = (found.rows - right.rows).norm(dim=1), right.rows.norm(dim=1)
    rounded = EPS * start.norm() * right.steps
    return float(((apart - rounded).clamp_min(0) / size.clamp_min(torch.finfo(torch.float32).tiny)).max())
