"""The engine trains and evaluates the devices of a chunk at once, in one process, by the method that was chosen for the
job."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from shoestring.core.job import Job
from shoestring.core.user_code.seams import calls_user
from shoestring.federated.devices.device_errors import exceptions_alone
from shoestring.federated.devices.records import Records
from shoestring.federated.model.layout import Layout
from shoestring.federated.playing.seeds import seed_of
from shoestring.federated.round import DeviceView, Objective, Order, Sums, Updates, Work
from shoestring.federated.simulation.cohort.fused.fused import FusedMethod
from shoestring.federated.simulation.cohort.fused.update_comparison import UpdateComparison
from shoestring.federated.simulation.cohort.held_out import held_out_metrics
from shoestring.federated.simulation.cohort.method import CohortMethod, CohortUpdates, MethodDiffers
from shoestring.federated.simulation.cohort.method_choice import MethodChoice, method_of
from shoestring.federated.simulation.cohort.sequential import make_model, sequential_method
from shoestring.federated.simulation.cohort.stacked.stacked import StackedMethod


class TrainedDevices(NamedTuple):
    """The result of training k devices."""

    rows: Tensor  # (k, size): their weights afterwards
    losses: Tensor  # (k) float64: mean training loss over samples
    steps: Tensor  # (k) int64: local steps


class Engine:
    """Trains and evaluates devices with a single copy of the job's model."""

    @calls_user("model")
    def __init__(self, job: Job, layout: Layout, how: MethodChoice) -> None:
        self.job, self.layout, self.how = job, layout, how
        self.model = make_model(job)
        self.plain = sequential_method(job, layout, self.model)
        self.method: CohortMethod = method_of(how, self.plain)
        self.differs = ""  # why the plain loop replaced the chosen method; empty if it did not

    @cached_property
    def whole_comparison(self) -> UpdateComparison:
        assert isinstance(self.method, FusedMethod), "asked for only then"
        return UpdateComparison(self.plain, self.method)

    def train_updates(
        self,
        start: Tensor,
        records: Sequence[Records],
        objective: Objective,
        seeds: Sequence[int],
        checks: bool = False,
    ) -> CohortUpdates:
        """Train k devices in chunks and return their updates. `start` (k, size): where each begins.

        `checks`: compare some of the work with the plain loop. If it differs, the plain loop is used from then on, and
        `differs` says why.
        """
        parts = []
        for begin in range(0, len(records), self.how.chunk):
            some = slice(begin, begin + self.how.chunk)
            parts.append(self.chunk(start[some], records[some], objective_slice(objective, some), seeds[some], checks))
        return concatenate_updates(parts)

    def chunk(
        self, start: Tensor, records: Sequence[Records], objective: Objective, seeds: Sequence[int], checks: bool
    ) -> CohortUpdates:
        """Train one chunk. If the method fails on it, train each device alone, and use the plain loop where the method
        still fails."""
        try:
            if checks and isinstance(self.method, FusedMethod):
                self.whole_comparison.check(start, records, objective, seeds)
            with exceptions_alone():
                if isinstance(self.method, StackedMethod):
                    return self.method.train(start, records, objective, seeds, checks)
                return self.method.train(start, records, objective, seeds)
        except MethodDiffers as why:
            self.differs, self.method = str(why), self.plain
            return self.plain.train(start, records, objective, seeds)
        except Exception:  # anything that a faster method can't do: the plain loop can, or reports the error
            if self.method is self.plain:
                raise
            if len(records) == 1:
                return self.plain.train(start, records, objective, seeds)
        alone = [slice(one, one + 1) for one in range(len(records))]
        return concatenate_updates(
            [self.chunk(start[one], records[one], objective_slice(objective, one), seeds[one], checks) for one in alone]
        )

    def train_weights(
        self, start: Tensor, records: Sequence[Records], objective: Objective, seeds: Sequence[int]
    ) -> TrainedDevices:
        """Train k devices and return their weights."""
        found = self.train_updates(start, records, objective, seeds, checks=True)
        return TrainedDevices(found.rows.add_(start), found.losses, found.steps)

    def evaluate(self, rows: Tensor, records: Sequence[Records]) -> tuple[Sums, ...]:
        """Held-out metrics of every device. `rows`: one model for all devices (size), or one for each (k, size)."""
        return held_out_metrics(self.job, self.layout, self.model, self.plain.outside, rows, records)


def concatenate_updates(parts: Sequence[CohortUpdates]) -> CohortUpdates:
    return parts[0] if len(parts) == 1 else CohortUpdates(*(torch.cat(values) for values in zip(*parts, strict=True)))


def objective_slice(objective: Objective, some: slice) -> Objective:
    correction = None if objective.correction is None else objective.correction[some]
    return Objective(objective.local, None, objective.pull, objective.anchor, correction)


def engine_work(engine: Engine) -> Work:
    """The `work` of a plain round.

    It raises MethodDiffers if the fast method turns out to be wrong. The caller must then play the whole round again by
    the plain loop, so that the result does not depend on which chunk noticed.
    """

    def work(order: Order, devices: Sequence[DeviceView], objective: Objective) -> Updates:
        records, names = [device.records for device in devices], tuple(device.name for device in devices)
        start = order.weights.expand(len(devices), -1) if objective.start is None else objective.start
        seeds = [seed_of(order.seed, "batches", order.round, name) for name in names]
        found = engine.train_updates(start, records, objective, seeds, checks=is_checked_round(order.round))
        if engine.differs:
            raise MethodDiffers(engine.differs)
        counts = torch.tensor([one.count for one in records], dtype=torch.float64)
        before: tuple[Sums, ...] = ()
        after: tuple[Sums, ...] = ()
        if order.judges:
            before = engine.evaluate(order.weights if objective.start is None else start, records)
            after = engine.evaluate(start + found.rows, records)
        return Updates(names, found.rows, counts, found.losses, before=before, after=after)

    return work


def is_checked_round(round: int) -> bool:
    """Whether a round compares some devices with the plain loop: rounds 1, 2, 4, 8, ...

    >>> [round for round in range(100) if is_checked_round(round)]
    [0, 1, 3, 7, 15, 31, 63]
    """
    return not round & (round + 1)
