"""Compares updates of the fused method with those of the plain loop during a run.

Fused steps never produce a single gradient that could be compared. So, whenever the smallest and largest record counts
of a chunk are a new pair, the first few steps of one device are compared as a whole: few steps, because rounding grows
from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shoestring.core.running import random_state
from shoestring.federated.devices.records import Records
from shoestring.federated.round import Objective
from shoestring.federated.simulation.cohort.agreement import distance
from shoestring.federated.simulation.cohort.fused.fused import FusedMethod
from shoestring.federated.simulation.cohort.method import CohortUpdates, MethodDiffers
from shoestring.federated.simulation.cohort.schedule import step_sizes
from shoestring.federated.simulation.cohort.sequential import SequentialMethod
from shoestring.federated.simulation.cohort.stacked.gradient_comparison import ATTEMPTS, CLOSE, NEARBY

STEPS = 4  # compared at most


class UpdateComparison:
    def __init__(self, plain: SequentialMethod, fused: FusedMethod) -> None:
        self.plain, self.fused = plain, fused
        self.seen: set[tuple[int, int]] = set()  # (fewest, most) records of the chunks compared so far

    def check(self, start: Tensor, records: Sequence[Records], objective: Objective, seeds: Sequence[int]) -> None:
        """Compare the device with the fewest records up to the end of its first epoch, where batches are short."""
        counts = [one.count for one in records]
        least, most = min(counts), max(counts)
        if (least, most) in self.seen:
            return
        self.seen.add((least, most))
        row = counts.index(least)
        steps = min(len(step_sizes(least, replace(objective.local, epochs=1))), STEPS)
        some = replace(objective, local=replace(objective.local, steps=steps))
        generator = torch.Generator().manual_seed(0)
        for attempt in range(ATTEMPTS):
            near = start if not attempt else start * (1 + NEARBY * torch.randn(start.shape, generator=generator))
            if (apart := self.relative_difference(near, records, some, seeds, row)) <= CLOSE:
                return
        raise MethodDiffers(
            f"the update of a device with {least} records, beside others with up to {most}, differs from the plain loop's "
            f"by {apart:.1g} of its size"
        )

    def relative_difference(
        self, start: Tensor, records: Sequence[Records], objective: Objective, seeds: Sequence[int], row: int
    ) -> float:
        one = slice(row, row + 1)
        correction = None if objective.correction is None else objective.correction[one]
        with random_state.fork_rng():
            right = self.plain.train(
                start[one], records[one], replace(objective, start=None, correction=correction), seeds[one]
            )
            found = self.fused.train(start, records, objective, seeds)
        if not bool(right.rows.isfinite().all()):
            return 0.0  # a device that diverges will be rejected anyway
        return distance(CohortUpdates(found.rows[one], found.losses[one], found.steps[one]), right, start[row])
