"""The ledger: the cost of one training step, as a timeline over blocks plus what stands the whole time.

Peaks do not add up; timelines do. A step walks the blocks forward, then backward, then updates the weights:

    forward of block i     standing + sum_{j<i} kept_j + rise_i
    backward of block i    standing + sum_{j<=i} kept_j + sum_{j>i} gradient_j + spike_i
    update                 standing + sum_j gradient_j + update.rise
    validation             standing + validation.rise

and the peak is the highest of these. For the process, each has the kernels' scratch memory on top, plus what the
allocator rounds up and keeps of freed memory, plus the base that the interpreter and its libraries need.

Contract: `workers.world` counts copies of the model: what cuts a model leaves fewer of them (`by_fewer_copies`), and
what unites copies needs to know of no other axis. A plan whose workers hold different parts is rehearsed for every kind
of worker; its peak is that of the one that needs most (tests/training/pipeline/test_rehearsed_stages.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, reduce
from typing import Any, overload

import numpy as np

from shoestring.core.costs.ledger_parts import (
    Allocation,
    Findings,
    Machine,
    Splitting,
    StandingBytes,
    Traffic,
    UpdateCost,
    ValidationCost,
    Workers,
)

Column = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Block:
    name: str
    inside: bool = True  # False: code outside of all blocks (embeddings before, head and loss after)
    kept: float = 0.0  # bytes allocated in its forward and alive at its end
    output: float = 0.0  # bytes of its output, which the next block takes; included in `kept`
    rise: float = 0.0  # bytes above the start of its forward at its peak
    spike: float = 0.0  # bytes in its backward's peak above what is kept and the later blocks' gradients
    gradient: float = 0.0  # bytes of weight gradients that its backward leaves
    forward: float = 0.0  # seconds
    backward: float = 0.0  # seconds, including recomputation
    flops: float = 0.0  # operations of its forward
    backward_flops: float = 0.0  # operations of its backward, including recomputation
    scratch: float = 0.0  # bytes that kernels allocate for themselves at the peak of its forward
    backward_scratch: float = 0.0
    spilled: float = 0.0  # bytes that are not kept because they are offloaded to disk,
    ahead: float = 0.0  # and of the previous block, prefetched

    def with_changes(self, **changes: float) -> Block:
        """`replace`, in a fraction of the time: a ranking makes millions of blocks."""
        new = object.__new__(Block)
        vars(new).update(vars(self), **changes)
        return new


class Blocks(Sequence[Block]):
    """The blocks of a step: rows to iterate over, or columns of numbers to compute with.

    Columns are kept; rows with changed columns are made on demand, because most ledgers of a ranking are only asked for
    their numbers."""

    def __init__(
        self,
        rows: Sequence[Block],
        columns: dict[str, Column] | None = None,
        changes: Mapping[str, Column] | None = None,
    ) -> None:
        self.unchanged = tuple(rows)
        self.columns: dict[str, Column] = {} if columns is None else columns  # of the rows, before the changes
        self.changes: Mapping[str, Column] = changes or {}

    def with_changes(self, **changes: Column) -> Blocks:
        """The blocks with other numbers in these columns."""
        return Blocks(self.unchanged, self.columns, {**self.changes, **changes})

    def column(self, name: str) -> Column:
        if name in self.changes:
            return self.changes[name]
        if name not in self.columns:
            self.columns[name] = np.array([vars(row)[name] for row in self.unchanged], dtype=float)
        return self.columns[name]

    def total(self, *names: str) -> float:
        """The sum of these columns, row after row, so that it has the same bits as a sum over rows."""
        column = reduce(np.add, map(self.column, names))
        return float(np.add.accumulate(column)[-1]) if len(column) else 0.0

    @cached_property
    def rows(self) -> tuple[Block, ...]:
        if not self.changes:
            return self.unchanged
        numbers = zip(*(column.tolist() for column in self.changes.values()), strict=True)
        return tuple(
            row.with_changes(**dict(zip(self.changes, own, strict=True)))
            for row, own in zip(self.unchanged, numbers, strict=True)
        )

    def __len__(self) -> int:
        return len(self.unchanged)

    @overload
    def __getitem__(self, place: int) -> Block: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Block, ...]: ...
    def __getitem__(self, place: int | slice) -> Block | tuple[Block, ...]:
        return self.rows[place]

    def __iter__(self) -> Iterator[Block]:
        return iter(self.rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (Blocks, tuple)) and self.rows == tuple(other)

    def __hash__(self) -> int:
        return hash(self.rows)

    def __repr__(self) -> str:
        return repr(self.rows)


NO_BLOCK_RUNS = (
    "no block of the model was called as a module in the rehearsed step (its layers are used in another way, such as by their "
    "weights), so there is nothing to wrap and nothing would be saved"
)
TIMELINE = ("kept", "rise", "scratch", "spike", "gradient", "backward_scratch")
NUMBERS = tuple(
    field.name for field in fields(Block) if field.name not in ("name", "inside", "gradient", "forward", "backward")
)


def interpolate(none: Block, full: Block, share: float) -> Block:
    """The block at a fraction of the batch: what does not depend on the batch, plus that fraction of the rest."""
    return full.with_changes(
        **{name: getattr(none, name) + share * (getattr(full, name) - getattr(none, name)) for name in NUMBERS}
    )


@dataclass(frozen=True)
class Ledger:
    blocks: Sequence[Block]  # `columns` gives the same as columns of numbers
    at_zero_batch: tuple[
        Block, ...
    ] = ()  # the same blocks at batch size zero: the part that does not shrink with the batch
    batch: int = 1  # samples that pass through the blocks at once
    pieces: int = 1  # times that the blocks run in a step (micro-batches)
    slices: int = 1  # slices of its sequences that a micro-batch runs in, all forward before any is backward
    standing: StandingBytes = field(default_factory=StandingBytes)
    update: UpdateCost = field(default_factory=UpdateCost)
    splitting: Splitting = field(default_factory=Splitting)
    traffic: Traffic = field(default_factory=Traffic)
    machine: Machine = field(default_factory=Machine)
    allocation: Allocation = field(default_factory=Allocation)
    workers: Workers = field(default_factory=Workers)
    findings: Findings = field(default_factory=Findings)
    validation: ValidationCost | None = None  # None: the job has none
    in_flight: float = 1.0  # micro-batches whose activations are kept at once
    stretch: float = 1.0  # seconds of a step per second that this worker computes, because it waits for others
    waiting: float = 0.0  # seconds that a step waits for its batch, whatever the techniques
    streamed: float = 0.0  # bytes of weights that are read from disk in every pass over a batch
    by_precision: Mapping[str, Ledger] = field(default_factory=dict)  # the same step measured at other precisions

    def __post_init__(self) -> None:
        if not isinstance(self.blocks, Blocks):
            object.__setattr__(self, "blocks", Blocks(self.blocks))

    @property
    def columns(self) -> Blocks:
        assert isinstance(self.blocks, Blocks)
        return self.blocks

    def has(self, trait: str) -> bool:
        """Whether the job has a trait that techniques depend on."""
        return trait in self.findings.traits

    def with_update_rise(self, least: float) -> Ledger:
        """The same step with an update that rises by at least this many bytes."""
        return replace(self, update=replace(self.update, rise=max(self.update.rise, least)))

    @property
    def block_gradients(self) -> float:
        """Bytes of the gradients that the blocks' backward leaves."""
        return self.columns.total("gradient")

    @property
    def all_gradients(self) -> float:
        """Bytes of those and of the gradients that stand the whole step."""
        return self.standing.gradients + self.block_gradients

    def tops(self) -> tuple[Column, Column]:
        """The step's timeline: bytes of tensors and of the process at the peak of every moment."""
        kept, rise, scratch, spike, gradient, backward_scratch = map(self.columns.column, TIMELINE)
        start = self.standing.total
        if self.in_flight > 1:
            start += (self.in_flight - 1) * self.columns.total("kept")
        forward = np.add.accumulate(np.concatenate(((start,), kept)))  # alive before each block, and after all of them
        backward = np.add.accumulate(np.concatenate((forward[-1:], (gradient - kept)[::-1])))
        after = [(float(backward[-1]) + self.update.rise, self.update.scratch)]
        if self.validation is not None:
            after.append(
                (self.standing.total - self.standing.gradients + self.validation.rise, self.validation.scratch)
            )
        tops, scratches = zip(*after, strict=True)
        tensors = np.concatenate((forward[:-1] + rise, backward[:-1] + spike[::-1], tops))
        rates = self.allocation.rates
        above = self.allocation.base + rates.retention * self.allocation.allocated / self.pieces
        return tensors, above + tensors * (1 + rates.slack) + np.concatenate(
            (scratch, backward_scratch[::-1], scratches)
        )

    def numbers(self) -> dict[str, float]:
        """The figures to rank and limit by, by name."""
        tensors, process = self.tops()
        return {
            "peak_bytes": float(tensors.max()),
            "process_bytes": float(process.max()),
            "step_seconds": self.seconds,
            "world": self.workers.everybody,
            "traffic_bytes": self.traffic.disk,
            "sent_bytes": self.traffic.sent,
        }

    @property
    def peak(self) -> float:
        """Largest number of tensor bytes alive at once."""
        return float(self.tops()[0].max())

    @property
    def process(self) -> float:
        """Largest number of bytes of the whole process."""
        return float(self.tops()[1].max())

    @property
    def seconds(self) -> float:
        """Time of one step."""
        work = self.stretch * self.pieces * self.columns.total("forward", "backward")
        allocating = self.allocation.allocated * self.allocation.rates.per_byte_allocated
        return max(work + self.update.seconds + self.traffic.waiting + allocating, 0.0) + self.waiting

    @property
    def validation_seconds(self) -> float:
        """Time of one validation; 0 if there is none. Includes waiting for weights that are read for every batch."""
        if self.validation is None:
            return 0.0
        reading = self.validation.batches * self.streamed * self.machine.per_byte_streamed
        return max(self.validation.seconds, reading) if self.streamed else self.validation.seconds

    @property
    def flops(self) -> float:
        """Operations of one step."""
        return self.pieces * self.columns.total("flops", "backward_flops")

    def pace(self, pieces: int) -> float:
        """Time of the batch in `pieces` micro-batches / time at once; linear between measurements.

        >>> Ledger((), splitting=Splitting(((1.0, 1.0), (2.0, 1.0), (8.0, 1.6)))).pace(5)
        1.3
        """
        numbers, seconds = zip(*self.splitting.paces, strict=True)
        if pieces > numbers[-1] and len(numbers) > 1:  # extrapolate the last line
            slope = (seconds[-1] - seconds[-2]) / (numbers[-1] - numbers[-2])
            return float(seconds[-1] + max(slope, 0.0) * (pieces - numbers[-1]))
        return float(np.interp(pieces, numbers, seconds))

    def in_pieces(self, pieces: int) -> Ledger:
        """The step with its batch in `pieces` micro-batches, one after the other; gradients stand from the first one
        on."""
        largest = -(-self.batch // pieces)
        both = list(zip(self.at_zero_batch, self.blocks, strict=True))
        parts = tuple(interpolate(none, full, largest / self.batch) for none, full in both)
        mean = tuple(interpolate(none, full, 1 / pieces) for none, full in both)
        share = self.pace(pieces) / pieces
        held = self.block_gradients
        adding = (
            (pieces - 1) / pieces * self.splitting.adding_seconds / max(held, 1.0)
        )  # per byte, the mean of all micro-batches
        blocks = tuple(  # a micro-batch's own gradient stands while it is added to the sum
            part.with_changes(
                gradient=0.0,
                forward=share * part.forward,
                backward=share * part.backward + adding * part.gradient,
                flops=middle.flops,
                backward_flops=middle.backward_flops,
            )
            for part, middle in zip(parts, mean, strict=True)
        )
        return replace(
            self,
            blocks=blocks,
            batch=largest,
            pieces=self.pieces * pieces,
            standing=replace(self.standing, gradients=self.standing.gradients + held),
        )

    def by_fewer_copies(self, factor: int) -> Ledger:
        """The step of a worker when `factor` workers share one replica of the model: there are fewer replicas, so each
        trains on `factor` times the samples. The caller subtracts the parts of the replica that the worker does not
        hold."""
        workers = self.workers
        fewer = max(workers.world // factor, 1)
        own = -(-workers.samples // fewer)
        share = own / workers.own if workers.own else factor
        empty = self.at_zero_batch or tuple(Block(block.name, block.inside) for block in self.blocks)
        blocks = tuple(
            interpolate(none, full, share).with_changes(forward=share * full.forward, backward=share * full.backward)
            for none, full in zip(empty, self.blocks, strict=True)
        )
        paces = ((1.0, 1.0), *((number * share, pace) for number, pace in self.splitting.paces if number * share > 1.0))
        return replace(
            self,
            blocks=blocks,
            at_zero_batch=empty,
            batch=max(round(self.batch * share), 1),
            splitting=replace(self.splitting, paces=paces),
            standing=replace(self.standing, inputs=share * self.standing.inputs),
            allocation=replace(self.allocation, allocated=share * self.allocation.allocated),
            workers=replace(workers, world=fewer, per_copy=workers.per_copy * factor, own=own),
        )

    @property
    def inside(self) -> tuple[Block, ...]:
        return tuple(block for block in self.blocks if block.inside)
