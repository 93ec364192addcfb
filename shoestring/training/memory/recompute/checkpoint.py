"""Checkpoint: activation checkpointing. Drop activations in the forward pass, recompute them in the backward pass.

With N equal blocks of `a` bytes and boundaries of `x` bytes, in segments of k:

    kept    N a   ->  N/k x  +  k a          least at k = sqrt(N x / a)
    time    F + B ->  2 F + B                every block in a segment runs forward twice

For uneven blocks `chain.best_schedules` finds the fastest schedule under a memory limit, nested where that pays. Exact:
the same kernels see the same numbers, random states and buffers, so the weights are bit-equal.
Chen, Xu, Zhang, Guestrin: Training Deep Nets with Sublinear Memory Cost, 2016, arXiv 1604.06174.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

from torch import nn

from shoestring.core.batch import Batch
from shoestring.core.costs.ledger import NO_BLOCK_RUNS, Block, Ledger
from shoestring.core.costs.ledger_parts import Trait
from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness
from shoestring.core.running.run import Run
from shoestring.training.memory.recompute.chain import best_schedules, recomputed_costs
from shoestring.training.memory.recompute.recompute import BlockRecorder, Schedule, flat
from shoestring.training.technique import TrainingTechnique

LIMITS = 24  # number of memory limits, from smallest to plain, for which the dynamic program is solved


@dataclass(frozen=True)
class Checkpoint(TrainingTechnique):
    """Compute activations again in backward instead of keeping them.

    Costs: up to one more forward in every step; schedules that keep some blocks cost less.

    Not for: models whose memory is weights and optimizer state, not activations, and blocks that can't be run twice
    with the same result.
    """

    every: int = 0  # blocks per segment; 1 recomputes block by block
    groups: int = 0  # or: number of segments; -1 takes sqrt(N)
    schedule: str = ""  # or: a nested schedule of block numbers, such as "((0, 1), 2, (3, (4, 5)))"

    order: ClassVar[int] = 40
    exact: ClassVar[bool] = True
    saves_memory: ClassVar[bool] = True
    why: ClassVar[str] = "activations are recomputed instead of kept"

    def __post_init__(self) -> None:
        if sum(map(bool, (self.every, self.groups, self.schedule))) > 1:
            raise Mistake("Checkpoint takes one of every, groups and schedule, not several")
        if self.every < 0 or self.groups < -1:
            raise Mistake(
                f"Checkpoint(every={self.every}, groups={self.groups}): give a positive number of blocks or groups"
            )
        if self.schedule:
            parse_schedule(self.schedule)

    @classmethod
    def choices(cls, ledger: Ledger) -> tuple[Checkpoint, ...]:
        count = len(ledger.inside)
        uniform = [cls(every=k) for k in range(1, count // 2 + 1) if k <= 4 or k % 2 == 0][:8]
        if ledger.workers.stages > 1:  # every stage has blocks of its own, so numbers over the whole model do not apply
            return (*uniform[:4], cls(groups=-1))
        return (*uniform, cls(groups=-1), *(cls(schedule=format_schedule(schedule)) for schedule in optimal(ledger)))

    @classmethod
    def easing(cls, samples: int) -> tuple[Checkpoint, ...]:
        return (cls(every=1),)

    def refusal(self, ledger: Ledger) -> str:
        if ledger.has(Trait.NO_BLOCK_RUNS):
            return NO_BLOCK_RUNS
        if ledger.has(Trait.NOT_RECOMPUTABLE):
            return ledger.findings.reasons[Trait.NOT_RECOMPUTABLE]
        numbers = flat(self.numbers(len(ledger.inside)))
        if numbers and numbers[-1] >= len(ledger.inside):
            return f"the schedule names block {numbers[-1]} and the model has {len(ledger.inside)} blocks"
        return ""

    def exactness(self, ledger: Ledger) -> Exactness:
        # Blocks of transformers' decoders are computed without their key-value cache: keys lie otherwise in memory then
        return Exactness.ROUNDING if ledger.has(Trait.CACHES) else Exactness.BITS

    def numbers(self, count: int) -> Schedule:
        """The schedule over `count` blocks."""
        if self.schedule:
            return parse_schedule(self.schedule)
        groups = self.groups if self.groups > 0 else max(round(math.sqrt(count)), 1)
        size = self.every or (1 if not self.groups else -(-count // groups))
        return tuple(tuple(range(start, min(start + size, count))) for start in range(0, count, size))

    def cost(self, ledger: Ledger) -> Ledger:
        blocks = recomputed_costs(ledger.blocks, ledger_schedule(ledger.blocks, self.numbers(len(ledger.inside))))
        again = sum(before.kept - after.kept for before, after in zip(ledger.blocks, blocks, strict=True))
        return replace(ledger, blocks=blocks, allocation=ledger.allocation.with_more(ledger.pieces * again))

    def apply(self, run: Run) -> Run:
        schedule = self.numbers(len(run.blocks))
        if flat(schedule) and flat(schedule)[-1] >= len(run.blocks):
            raise Mistake(f"{self}: the model has {len(run.blocks)} blocks, {', '.join(run.blocks)}")
        recorder = BlockRecorder(run.blocks, schedule)

        def forward(model: nn.Module, batch: Batch) -> Any:
            with recorder.around():
                return run.forward(model, batch)

        return replace(run, forward=forward)


def ledger_schedule(blocks: Sequence[Block], schedule: Schedule) -> Schedule:
    """A schedule over the model's blocks as one over all entries of the ledger; a segment ends where code runs between
    blocks."""
    positions = [position for position, block in enumerate(blocks) if block.inside]

    def to_block_positions(items: Schedule) -> list[Any]:
        out: list[Any] = []
        for item in items:
            if isinstance(item, int):
                if item < len(positions):
                    out.append(positions[item])
                continue
            inner: list[Any] = []
            for part in to_block_positions(item):
                if inner and flat((part,))[0] != flat(tuple(inner))[-1] + 1:
                    out.append(tuple(inner))
                    inner = []
                inner.append(part)
            if inner:
                out.append(tuple(inner))
        return out

    return tuple(to_block_positions(schedule))


def optimal(ledger: Ledger) -> list[Schedule]:
    """Schedules of the dynamic program for limits from smallest to plain memory, over the model's blocks."""
    blocks = ledger.blocks
    number = {position: k for k, position in enumerate(p for p, block in enumerate(blocks) if block.inside)}
    if len(number) < 2:
        return []
    most = replace(ledger, validation=None).peak - ledger.standing.total
    limits = [most * k / LIMITS for k in range(1, LIMITS + 1)]

    def inside_only(items: Schedule) -> Schedule:
        return tuple(
            number[item] if isinstance(item, int) else inside_only(item)
            for item in items
            if not isinstance(item, int) or item in number
        )

    return list(dict.fromkeys(inside_only(schedule) for schedule in best_schedules(blocks, limits)))


def format_schedule(schedule: Schedule) -> str:
    return str(schedule).replace(" ", "")


@cache
def parse_schedule(text: str) -> Schedule:
    try:
        schedule = ast.literal_eval(text)
        numbers = flat(schedule)
    except (ValueError, SyntaxError, TypeError):
        raise Mistake(
            f"{text!r} is not a schedule: write block numbers in nested brackets, such as ((0,1),2,(3,(4,5)))"
        ) from None
    if any(not isinstance(number, int) or number < 0 for number in numbers) or numbers != sorted(set(numbers)):
        raise Mistake(f"the schedule {text} must name blocks once each, in rising order, from 0")
    return schedule  # type: ignore[no-any-return]
