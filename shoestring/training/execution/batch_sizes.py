"""Sizes of batches while training: a batch larger than what was planned for is told of before its step, and which steps are tracked.

The first two steps are tracked, and every one whose batch is larger than those of all tracked before but the first, so that what is
measured is what the largest batch needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod

from shoestring.core.batch import Batch
from shoestring.core.units import bytes_text
from shoestring.data.lengths import BatchSize, Lengths, largest_of, size_of
from shoestring.training.plan import Plan

TRACKED = 2  # steps that always are
# Parts of a peak that no batch changes
STANDING = ("parameters", "buffers", "optimizer", "constants", "data", "gradients", "buffers of the disk")


@dataclass(frozen=True)
class ExpectedBatches:
    """What a plan expects of batches."""

    lengths: Lengths = field(default_factory=Lengths)
    process: int = 0  # bytes of the process with the largest of them,
    growing: int = 0  # of which so many grow with the batch,
    spare: int = 0  # but only after these: the peak is elsewhere
    tracked: bool = True  # False: shoestring could not look at the model, so no step is tracked

    def process_for(self, ratio: float) -> int:
        """Bytes of the process with a batch so many times as large as the largest, in proportion."""
        return int(self.process + max(self.growing * (ratio - 1) - self.spare, 0))


def expected(plan: Plan) -> ExpectedBatches:
    standing = sum(size for name, size in plan.parts if name in STANDING)
    highest = max((size for name, size in plan.blocks if not name.startswith("update")), default=plan.peak_bytes)
    return ExpectedBatches(
        plan.lengths, plan.process_bytes, max(highest - standing, 0), max(plan.peak_bytes - highest, 0), plan.looked
    )


class BatchSizes:
    """Watches the batches of one worker, which are parts of the job's."""

    def __init__(self, expected: ExpectedBatches, budget: int | None, parts: int, warn: Callable[[str], None]) -> None:
        self.expected, self.budget, self.warn = expected, budget, warn
        self.known = [
            part_of(one, parts) for one in expected.lengths.largest
        ]  # what was planned for, and what was warned of
        self.planned = list(self.known)
        self.tracked: list[BatchSize] = []  # the largest of those that were
        self.count = 0  # steps that were tracked

    def tracks(self, batch: Batch, step: int) -> bool:
        """Whether to track the step with this number, of this batch; one that was not planned for is warned of."""
        if not self.expected.tracked:
            return False
        size = size_of(batch, step - 1)
        self.check(size, step)
        if self.count >= TRACKED and any(one.covers(size) for one in self.tracked):
            return False
        if step > 1:  # the first step of a run has no optimizer state yet, and needs less than others of its size
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
    """Whether a batch has more bytes than all that are known, or is longer in some dimension than all of them."""
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
    """How large the largest part of a batch is that so many workers share."""
    firsts = Counter(shape[0] for shape in size.shapes if shape)
    if parts == 1 or not firsts:
        return size
    count = firsts.most_common(1)[0][0]
    shapes = tuple((-(-count // parts), *shape[1:]) if shape and shape[0] == count else shape for shape in size.shapes)
    share = sum(map(prod, shapes)) / max(sum(map(prod, size.shapes)), 1)
    return replace(size, shapes=shapes, bytes=int(size.bytes * share))
