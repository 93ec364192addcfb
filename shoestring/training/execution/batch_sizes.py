"""Batch sizes during training: warn before a step whose batch is larger than planned, and choose which steps are
tracked.

Tracked are the first two steps, and every step whose batch is larger than all tracked ones after the first, so that the
measured memory is that of the largest batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod

from shoestring.core.batch import Batch
from shoestring.core.units import bytes_text
from shoestring.data.lengths import BatchSize, Lengths, largest_of, size_of
from shoestring.training.planning.plan import TrainingPlan

TRACKED = 2  # the first so many steps are always tracked
# Parts of a peak that do not depend on the batch
STANDING = ("parameters", "buffers", "optimizer", "constants", "data", "gradients", "buffers of the disk")


@dataclass(frozen=True)
class ExpectedBatches:
    """The batches that a plan expects."""

    lengths: Lengths = field(default_factory=Lengths)
    process: int = 0  # bytes of the process with the largest of them,
    growing: int = 0  # the part of it that grows with the batch,
    spare: int = 0  # and how much that can grow before it matters, because the peak is elsewhere
    tracked: bool = True  # False: shoestring could not inspect the model, so no step is tracked

    def process_for(self, ratio: float) -> int:
        """Bytes of the process with a batch `ratio` times as large as the largest, in proportion."""
        return int(self.process + max(self.growing * (ratio - 1) - self.spare, 0))


def expected_batches(plan: TrainingPlan) -> ExpectedBatches:
    found, peak, process = plan.details, int(plan.predicted["peak_bytes"]), int(plan.predicted["process_bytes"])
    standing = sum(size for name, size in found.parts.items() if name in STANDING)
    highest = max((size for name, size in found.blocks if not name.startswith("update")), default=peak)
    return ExpectedBatches(found.lengths, process, max(highest - standing, 0), max(peak - highest, 0), found.looked)


class BatchSizes:
    """Watches the batches of one worker, which are parts of the job's."""

    def __init__(self, expected: ExpectedBatches, budget: int | None, parts: int, warn: Callable[[str], None]) -> None:
        self.expected, self.budget, self.warn = expected, budget, warn
        self.known = [
            part_of(one, parts) for one in expected.lengths.largest
        ]  # sizes that were planned for, and sizes that were warned about
        self.planned = list(self.known)
        self.tracked: list[BatchSize] = []  # the largest tracked sizes
        self.count = 0  # number of tracked steps

    def tracks(self, batch: Batch, step: int) -> bool:
        """Whether to track this step; warns about a batch that was not planned for."""
        if not self.expected.tracked:
            return False
        size = size_of(batch, step - 1)
        self.check(size, step)
        if self.count >= TRACKED and any(one.covers(size) for one in self.tracked):
            return False
        if step > 1:  # a run's first step has no optimizer state yet, so it needs less than others of its size
            self.tracked = largest_of([*self.tracked, size])
        self.count += 1
        return True

    def check(self, size: BatchSize, step: int) -> None:
        if not self.known or not is_beyond(size, self.known):
            return
        self.known.append(size)
        largest = self.planned[0]
        ratio = size.bytes / max(largest.bytes, 1)
        needs = self.expected.process_for(max(ratio, 1.0))
        fits = ""
        if self.budget:
            stands = "more than" if needs > self.budget else "within"
            fits = (
                f"; in proportion to its bytes the process will have about {bytes_text(needs)}, {stands} the budget of "
                f"{bytes_text(self.budget)}"
            )
        out = "; it may run out of memory" if self.budget and needs > self.budget else ""
        self.warn(
            f"the batch of step {step} is larger than what was planned for: {size} with {bytes_text(size.bytes)}, and the plan is "
            f"for {largest} with {bytes_text(largest.bytes)}{fits}{out}. State the largest batch with largest=lambda: ... in the Job"
        )


def is_beyond(size: BatchSize, known: list[BatchSize]) -> bool:
    """Whether a batch has more bytes than all known ones, or is longer in some dimension than all of them."""
    if size.bytes > max(one.bytes for one in known):
        return True
    alike = [one for one in known if list(map(len, one.shapes)) == list(map(len, size.shapes))]
    most = [
        max(values)
        for values in zip(*([number for shape in one.shapes for number in shape] for one in alike), strict=True)
    ]
    return bool(alike) and any(
        number > limit for number, limit in zip((n for shape in size.shapes for n in shape), most, strict=True)
    )


def part_of(size: BatchSize, parts: int) -> BatchSize:
    """The size of the largest part of a batch shared by `parts` workers."""
    firsts = Counter(shape[0] for shape in size.shapes if shape)
    if parts == 1 or not firsts:
        return size
    count = firsts.most_common(1)[0][0]
    shapes = tuple((-(-count // parts), *shape[1:]) if shape and shape[0] == count else shape for shape in size.shapes)
    share = sum(map(prod, shapes)) / max(sum(map(prod, size.shapes)), 1)
    return replace(size, shapes=shapes, bytes=int(size.bytes * share))
