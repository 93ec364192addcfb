"""The work of fused devices beside that of the plain loop, while devices work.

Fused steps are written by hand, and no gradient of theirs can be looked at by itself. So the first steps of one device of every new
pair of sizes, the fewest and the most records of a chunk, are compared whole: few, because rounding grows from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shoestring.core import random_state
from shoestring.federated.records import Records
from shoestring.federated.round import Objective
from shoestring.federated.simulation.cohort.agreement import distance
from shoestring.federated.simulation.cohort.comparison import ATTEMPTS, CLOSE, NEARBY
from shoestring.federated.simulation.cohort.fused import FusedMethod
from shoestring.federated.simulation.cohort.schedule import step_sizes
from shoestring.federated.simulation.cohort.sequential import SequentialMethod
from shoestring.federated.simulation.cohort.way import Differs, Moved

STEPS = 4  # that are compared, at most


class WholeComparison:
    def __init__(self, plain: SequentialMethod, fused: FusedMethod) -> None:
        self.plain, self.fused = plain, fused
        self.seen: set[tuple[int, int]] = set()  # fewest and most records of a device

    def check(self, start: Tensor, records: Sequence[Records], objective: Objective, seeds: Sequence[int]) -> None:
        """Compare the device with the fewest records, up to the end of its first epoch, where batches are short."""
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
            if (apart := self.apart(near, records, some, seeds, row)) <= CLOSE:
                return
        raise Differs(
            f"the update of a device with {least} records, beside others with up to {most}, differs from the plain loop's "
            f"by {apart:.1g} of its size"
        )

    def apart(
        self, start: Tensor, records: Sequence[Records], objective: Objective, seeds: Sequence[int], row: int
    ) -> float:
        one = slice(row, row + 1)
        correction = None if objective.correction is None else objective.correction[one]
        with random_state.kept():
            right = self.plain.moved(
                start[one], records[one], replace(objective, start=None, correction=correction), seeds[one]
            )
            found = self.fused.moved(start, records, objective, seeds)
        if not bool(right.rows.isfinite().all()):
            return 0.0  # a device that diverges is rejected for that
        return distance(Moved(found.rows[one], found.losses[one], found.steps[one]), right, start[row])
