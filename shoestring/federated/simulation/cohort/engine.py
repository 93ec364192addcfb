"""The engine: trains and judges the devices of a chunk at once, in one process, in the way that was found for the job."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from shoestring.core.job import Job
from shoestring.core.seams import calls_user
from shoestring.federated.layout import Layout
from shoestring.federated.records import Records
from shoestring.federated.round import DeviceView, Objective, Order, Sums, Updates, Work
from shoestring.federated.seeds import seed_of
from shoestring.federated.simulation.cohort.fused import FusedMethod
from shoestring.federated.simulation.cohort.how import How, way_of
from shoestring.federated.simulation.cohort.judge import judged
from shoestring.federated.simulation.cohort.sequential import made_model, sequential
from shoestring.federated.simulation.cohort.stacked import StackedMethod
from shoestring.federated.simulation.cohort.way import CohortMethod, Differs, Moved
from shoestring.federated.simulation.cohort.whole_comparison import WholeComparison


class TrainedDevices(NamedTuple):
    """What k devices have at the end of their work."""

    rows: Tensor  # (k, size): their weights
    losses: Tensor  # (k) float64: mean training loss of their steps, by samples
    steps: Tensor  # (k) int64


class Engine:
    """Has the job's model, once."""

    @calls_user("model")
    def __init__(self, job: Job, layout: Layout, how: How) -> None:
        self.job, self.layout, self.how = job, layout, how
        self.model = made_model(job)
        self.plain = sequential(job, layout, self.model)
        self.way: CohortMethod = way_of(how, self.plain)
        self.differs = ""  # why the plain loop works although `how` says otherwise

    @cached_property
    def whole_comparison(self) -> WholeComparison:
        assert isinstance(self.way, FusedMethod), "asked for only then"
        return WholeComparison(self.plain, self.way)

    def moved(
        self,
        start: Tensor,
        records: Sequence[Records],
        objective: Objective,
        seeds: Sequence[int],
        checks: bool = False,
    ) -> Moved:
        """The work of k devices; `start` (k, size) is where each begins. As many at once as `how` says. `checks`: some of it is compared
        with the plain loop; if it differs, that is what is given from then on, and `differs` says why."""
        parts = []
        for begin in range(0, len(records), self.how.chunk):
            some = slice(begin, begin + self.how.chunk)
            parts.append(self.chunk(start[some], records[some], part_of(objective, some), seeds[some], checks))
        return joined(parts)

    def chunk(
        self, start: Tensor, records: Sequence[Records], objective: Objective, seeds: Sequence[int], checks: bool
    ) -> Moved:
        """The work of one chunk. Where a device does not suit the way, or fails in it, each works alone, plainly if it must."""
        try:
            if checks and isinstance(self.way, FusedMethod):
                self.whole_comparison.check(start, records, objective, seeds)
            if isinstance(self.way, StackedMethod):
                return self.way.moved(start, records, objective, seeds, checks)
            return self.way.moved(start, records, objective, seeds)
        except Differs as why:
            self.differs, self.way = str(why), self.plain
            return self.plain.moved(start, records, objective, seeds)
        except Exception:  # whatever a faster way can't do: the plain loop can, or says what is wrong
            if self.way is self.plain:
                raise
            if len(records) == 1:
                return self.plain.moved(start, records, objective, seeds)
        alone = [slice(one, one + 1) for one in range(len(records))]
        return joined(
            [self.chunk(start[one], records[one], part_of(objective, one), seeds[one], checks) for one in alone]
        )

    def trained(
        self, start: Tensor, records: Sequence[Records], objective: Objective, seeds: Sequence[int]
    ) -> TrainedDevices:
        """The same, with the weights that they end at."""
        found = self.moved(start, records, objective, seeds, checks=True)
        return TrainedDevices(found.rows.add_(start), found.losses, found.steps)

    def judged(self, rows: Tensor, records: Sequence[Records]) -> tuple[Sums, ...]:
        """Metrics of every device on what it holds out, of one row for all of them (size) or a row each (k, size)."""
        return judged(self.job, self.layout, self.model, self.plain.beside, rows, records)


def joined(parts: Sequence[Moved]) -> Moved:
    return parts[0] if len(parts) == 1 else Moved(*(torch.cat(values) for values in zip(*parts, strict=True)))


def part_of(objective: Objective, some: slice) -> Objective:
    correction = None if objective.correction is None else objective.correction[some]
    return Objective(objective.local, None, objective.pull, objective.anchor, correction)


def work_of(engine: Engine) -> Work:
    """The work of a round that no technique has changed. It raises Differs where a faster way is found to be wrong: then the whole round
    is to be played again, plainly, so that its result does not depend on who found out."""

    def work(order: Order, devices: Sequence[DeviceView], objective: Objective) -> Updates:
        records, names = [device.records for device in devices], tuple(device.name for device in devices)
        start = order.weights.expand(len(devices), -1) if objective.start is None else objective.start
        seeds = [seed_of(order.seed, "batches", order.round, name) for name in names]
        found = engine.moved(start, records, objective, seeds, checks=is_checked(order.round))
        if engine.differs:
            raise Differs(engine.differs)
        counts = torch.tensor([one.count for one in records], dtype=torch.float64)
        before: tuple[Sums, ...] = ()
        after: tuple[Sums, ...] = ()
        if order.judges:
            before = engine.judged(order.weights if objective.start is None else start, records)
            after = engine.judged(start + found.rows, records)
        return Updates(names, found.rows, counts, found.losses, before=before, after=after)

    return work


def is_checked(round: int) -> bool:
    """Whether devices' work is compared with the plain loop in a round.

    >>> [round for round in range(100) if is_checked(round)]
    [0, 1, 3, 7, 15, 31, 63]
    """
    return not round & (round + 1)
