"""The cost of a pipeline, computed from the plain step's ledger: seconds of its schedule, bytes of each of its stages.

    samples     S workers hold one replica, so a replica trains on S times the samples of one worker, in M micro-batches
    seconds     those of the schedule, played with each chunk's forward and backward; plus the update of the largest stage
    memory      of stage s: its weights with gradients and optimizer state, and the activations of `held` micro-batches
                (training/pipeline/schedule.py); PipeDream also keeps the weights that micro-batches in flight began with, and
                makes an update for every micro-batch
    sent        M times what crosses the cuts: outputs forward, their gradients back

The resulting ledger is that of the stage that needs most memory. Code between two blocks is computed by the worker of
the first of them, as in training/pipeline/stages/walk.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import accumulate, pairwise

import numpy as np

from shoestring.core.costs.ledger import TIMELINE, Block, Blocks, Ledger
from shoestring.core.costs.ledger_parts import StandingBytes, Traffic, UpdateCost, Workers
from shoestring.core.workers.actions import HALVES, Action, Kind, idle_share
from shoestring.core.workers.staging import Staging, Work
from shoestring.training.pipeline.partition.partition import (
    BlockCost,
    Holding,
    best_cut,
    least_demanding,
    smallest_maximum,
)
from shoestring.training.pipeline.schedule import (
    activation_counts_by_formula,
    check_schedule,
    in_slices,
    one_worker,
    orders,
    sliced_steps,
    timeline_of,
)

RECEIVED = "(received)"  # the ledger row for what the previous stage sends
HALVED = 1.3  # bytes of gradients kept between the halves of a backward, per byte of activations (a GPT, measured)
ROUNDING = 1e-9  # by which a sum of seconds may depend on the order of its terms
STASHING = "pipedream"  # in this schedule every micro-batch in flight keeps the weights that it began with


@dataclass(frozen=True)
class CostUnit:
    """The smallest part that can be cut off: a block with the code around it, for one micro-batch."""

    rows: tuple[Block, ...]
    weights: float  # bytes
    arriving: float  # bytes that cross a cut right before it

    @cached_property
    def layer(self) -> BlockCost:
        return BlockCost(
            self.rows[0].name,
            sum(row.forward for row in self.rows),
            sum(row.backward for row in self.rows),
            self.weights,
            sum(row.kept for row in self.rows),
            self.arriving,
            self.arriving,
        )


@dataclass(frozen=True)
class Pipe:
    """The cost of a step in a pipeline."""

    ledger: Ledger  # of a whole replica, in micro-batches
    units: tuple[CostUnit, ...]
    stages: int
    pieces: int
    schedule: str
    cut: tuple[int, ...]  # units in every chunk of the model: chunk c is on worker c modulo `stages`
    vertical: bool = False  # pipedream: every stage uses the weight version that the micro-batch began with
    flush: int = 1  # pipedream: steps between two drains of the pipeline

    @property
    def chunks(self) -> int:
        """Chunks of the model on each worker."""
        return max(len(self.cut) // self.stages, 1)

    @cached_property
    def members(self) -> list[tuple[CostUnit, ...]]:
        """The units of every chunk."""
        ends = list(accumulate(self.cut))
        return [self.units[end - size : end] for end, size in zip(ends, self.cut, strict=True)]

    @cached_property
    def seconds(self) -> list[tuple[float, float]]:
        """(forward, backward) seconds of every chunk for one micro-batch, or the mean over its slices; with sending,
        where that takes the worker's time."""
        found, workers, part = [], self.ledger.workers, 1 / self.ledger.slices
        for number, chunk in enumerate(self.members):
            forward, backward = (
                sum(one) for one in zip(*((unit.layer.forward, unit.layer.backward) for unit in chunk), strict=True)
            )
            forward, backward = part * forward, part * backward
            if not workers.hides and number + 1 < len(self.members):
                forward += workers.seconds(part * self.members[number + 1][0].arriving, 1)
            if not workers.hides and number:
                backward += workers.seconds(part * chunk[0].arriving, 1)
            found.append((forward, backward))
        return found

    @property
    def carried_seconds(self) -> float:
        """Seconds that a message travels while both workers compute."""
        workers = self.ledger.workers
        largest = max((chunk[0].arriving for chunk in self.members[1:]), default=0.0) / self.ledger.slices
        return workers.seconds(largest, 1) if workers.hides else 0.0

    @cached_property
    def step(self) -> float:
        """Seconds of all micro-batches, forward and backward."""
        if self.schedule == STASHING:  # the pipeline fills and drains once in `flush` steps
            each = [sum(sum(self.seconds[chunk]) for chunk in self.of(worker)) for worker in range(self.stages)]
            return self.pieces * max(each) + (sum(each) - max(each)) / self.flush
        return schedule_seconds(
            self.schedule,
            self.stages,
            self.pieces,
            self.chunks,
            tuple(self.seconds),
            self.carried_seconds,
            self.ledger.slices,
        )

    @cached_property
    def least_step(self) -> float:
        """A lower bound of `step`, without playing the schedule: a worker waits until the first forward has come to it,
        does all its work, and the last gradient goes back from it to the first chunk.

        In equal stages gpipe and 1f1b take just that. A zero-bubble worker may end with gradients of weights, which
        nobody waits for.
        """
        if self.schedule == STASHING:
            return self.step
        whole, least, come, back = self.pieces * self.ledger.slices, 0.0, 0.0, 0.0
        for worker in range(self.stages):
            busy = sum(forward + backward for forward, backward in (self.seconds[chunk] for chunk in self.of(worker)))
            least = max(least, come + whole * busy + (0.0 if self.schedule == "zero-bubble" else back))
            come += self.seconds[worker][0] + self.carried_seconds
            back += self.seconds[worker][1] + self.carried_seconds
        return (1 - ROUNDING) * least

    def of(self, worker: int) -> range:
        """The chunks on a worker."""
        return range(worker, len(self.cut), self.stages)

    @property
    def bubble(self) -> float:
        busy = self.pieces * self.ledger.slices * sum(forward + backward for forward, backward in self.seconds)
        return max(1 - busy / (self.stages * self.step), 0.0) if self.step else 0.0

    def stage(self, worker: int) -> Ledger:
        """The ledger of one stage."""
        ledger, own = self.ledger, [unit for chunk in self.of(worker) for unit in self.members[chunk]]
        share = self.shares[worker]
        rows = tuple(row for unit in own for row in unit.rows)
        arriving = self.arriving(worker)
        received = (Block(RECEIVED, False, kept=arriving, rise=arriving),) if arriving else ()
        empty = self.at_zero_batch
        blocks = (*received, *rows)
        busy = self.pieces * sum(row.forward + row.backward for row in rows)
        update = self.update
        latest = update.seconds * (max(self.shares) - share)  # every stage waits for the largest stage's update
        return replace(
            ledger,
            blocks=blocks,
            at_zero_batch=tuple(empty.get(row.name, Block(row.name, False)) for row in blocks),
            in_flight=self.in_flight(worker),
            stretch=self.step / busy if busy else 1.0,
            standing=self.standing(worker),
            update=replace(
                update,
                seconds=update.seconds * share,
                rise=update.rise * share,
                call_seconds=update.call_seconds * share,
                fused_seconds=None if update.fused_seconds is None else update.fused_seconds * share,
            ),
            splitting=replace(ledger.splitting, adding_seconds=ledger.splitting.adding_seconds * share),
            allocation=replace(ledger.allocation, allocated=ledger.allocation.allocated / self.stages),
            traffic=self.part_of(ledger.traffic, len(own) / len(self.units))
            + Traffic(sent=self.sent_bytes(worker), waiting=latest),
            workers=replace(ledger.workers, stages=self.stages),
        )

    def peak(self, worker: int) -> float:
        """The peak of one stage, in a fraction of the time that its whole ledger takes."""
        whole, arriving = self.ledger.columns, self.arriving(worker)
        columns = {}
        for name in TIMELINE:
            column, first = whole.column(name), [arriving if name in ("kept", "rise") else 0.0] * bool(arriving)
            columns[name] = np.concatenate((first, *(column[self.places[chunk]] for chunk in self.of(worker))))
        update = UpdateCost(rise=self.ledger.update.rise * self.shares[worker])
        found = Ledger(
            Blocks((), columns),
            standing=self.standing(worker),
            update=update,
            validation=self.ledger.validation,
            in_flight=self.in_flight(worker),
        )
        return found.peak

    @cached_property
    def places(self) -> list[slice]:
        """The rows of every chunk among those of the ledger."""
        ends = list(accumulate((len(unit.rows) for unit in self.units), initial=0))
        units = list(accumulate(self.cut, initial=0))
        return [slice(ends[begin], ends[end]) for begin, end in pairwise(units)]

    @cached_property
    def at_zero_batch(self) -> dict[str, Block]:
        return {row.name: row for row in self.ledger.at_zero_batch}

    def arriving(self, worker: int) -> float:
        """Bytes that other workers send to this one's chunks for a micro-batch's forward."""
        return sum(self.members[chunk][0].arriving for chunk in self.of(worker) if chunk)

    @cached_property
    def held(self) -> tuple[int, ...]:
        return activation_counts_by_formula(self.schedule, self.stages, self.pieces, self.chunks)

    def in_flight(self, worker: int) -> float:
        return max((self.held[worker] - self.waiting(worker)) / self.chunks, 1.0)

    def standing(self, worker: int) -> StandingBytes:
        standing, share, waiting = self.ledger.standing, self.shares[worker], self.waiting(worker)
        kept = (row.kept for chunk in self.of(worker) for unit in self.members[chunk] for row in unit.rows)
        return replace(
            standing,
            parameters=standing.parameters * share * self.versions(worker),
            optimizer=standing.optimizer * share,
            gradients=standing.gradients * share,
            inputs=standing.inputs + (waiting * (1 + HALVED) * sum(kept) if waiting else 0.0),
        )

    def part_of(self, traffic: Traffic, share: float) -> Traffic:
        """The traffic of a worker's blocks, as a share of all blocks' traffic."""
        return Traffic(*(share * one for one in (traffic.disk, traffic.disk_seconds, traffic.sent, traffic.waiting)))

    def versions(self, worker: int) -> int:
        """Versions of a stage's weights that are kept at once."""
        if self.schedule != STASHING:
            return 1
        return activation_counts_by_formula(self.schedule, self.stages, self.pieces)[0 if self.vertical else worker]

    @property
    def update(self) -> UpdateCost:
        """The update of all weights in a step; pipedream makes one per micro-batch. (Copying the stashed weights is not
        counted.)"""
        one, times = self.ledger.update, self.pieces if self.schedule == STASHING else 1
        return replace(
            one,
            seconds=times * one.seconds,
            fused_seconds=None if one.fused_seconds is None else times * one.fused_seconds,
        )

    def waiting(self, worker: int) -> int:
        """Micro-batches between the two halves of their backward. Their activations stay, including recomputed ones,
        and so do the gradients that were computed from them."""
        return min(worker, self.pieces - 1) if self.schedule == "zero-bubble" else 0

    @cached_property
    def shares(self) -> tuple[float, ...]:
        """The fraction of all weights on each worker."""
        whole = sum(unit.weights for unit in self.units)
        held = (
            sum(unit.weights for chunk in self.of(worker) for unit in self.members[chunk])
            for worker in range(self.stages)
        )
        return tuple(one / whole if whole else 1 / self.stages for one in held)

    def sent_bytes(self, worker: int) -> float:
        """Bytes that a worker sends in a step: its chunks' outputs forward, and the gradients of their inputs."""
        return self.pieces * sum(
            (self.members[chunk + 1][0].arriving if chunk + 1 < len(self.cut) else 0.0)
            + (self.members[chunk][0].arriving if chunk else 0.0)
            for chunk in self.of(worker)
        )

    def largest(self) -> Ledger:
        """The ledger of the worker that needs most memory."""
        return self.stage(max(range(self.stages), key=self.peak))

    def staging(self, after: Ledger) -> Staging:
        """The plan's description of its stages, with the timeline. `after` is the ledger of the neediest worker under
        the whole plan: what other techniques add to the seconds of its blocks, they add to all workers."""
        names = {block.name for block in after.blocks}
        before = [row for unit in self.units for row in unit.rows if row.name in names]
        longer = [
            sum(now) / sum(own) if sum(own) else 1.0
            for now, own in (
                ([block.forward for block in after.blocks], [row.forward for row in before]),
                ([block.backward for block in after.blocks], [row.backward for row in before]),
            )
        ]

        def seconds(action: Action) -> float:
            forward, backward = (one * more for one, more in zip(self.seconds[action.chunk], longer, strict=True))
            return (
                forward if action.kind is Kind.FORWARD else backward if action.kind is Kind.BACKWARD else backward / 2
            )

        order = in_slices(orders(self.schedule, self.stages, self.pieces, self.chunks), self.ledger.slices)
        timeline = timeline_of(order, seconds, self.carried_seconds)
        bubble = self.bubble if self.schedule == STASHING else idle_share(timeline)
        return Staging(
            self.cut,
            self.schedule,
            self.pieces,
            bubble,
            tuple(
                tuple(
                    Work(str(span.action.kind), span.action.piece, span.action.chunk, span.begin, span.end)
                    for span in own
                )
                for own in timeline
            ),
            tuple(map(self.peak, range(self.stages))),
            names=tuple(row.name for unit in self.units for row in unit.rows if row.inside),
        )


def pipe_of(
    ledger: Ledger,
    stages: int,
    pieces: int,
    schedule: str,
    chunks: int = 1,
    balance: Sequence[int] = (),
    vertical: bool = False,
    flush: int = 1,
) -> Pipe:
    """The pipeline's cost on a plain step's ledger, cut as `balance` says, or into chunks with weights as equal as
    possible."""
    copy = ledger.by_fewer_copies(stages)
    pieces = min(pieces, max(copy.batch, 1))
    whole = copy.in_pieces(pieces)
    units = tuple(units_of(whole))
    cut = tuple(balance) or smallest_maximum([unit.weights for unit in units], stages * chunks)
    return Pipe(whole, units, stages, pieces, schedule, cut, vertical, flush)


def units_of(ledger: Ledger) -> Iterator[CostUnit]:
    """A ledger's rows grouped by the block call they belong to. A unit's weights are known by the size of their
    gradients; frozen weights are assumed to be spread evenly."""
    known = {row.name: row.gradient for row in ledger.at_zero_batch or ledger.blocks}
    rows: list[list[Block]] = []
    before: list[Block] = []
    for row in ledger.blocks:
        if row.inside:
            rows.append([*before, row])
            before = []
        else:
            (rows[-1] if rows else before).append(row)
    rows = rows or [before]
    still = max(ledger.standing.parameters - sum(known.values()), 0.0) / len(rows)
    arriving = 0.0
    for own in rows:
        yield CostUnit(tuple(own), sum(known.get(row.name, 0.0) for row in own) + still, arriving)
        arriving = next((row.output for row in reversed(own) if row.inside), 0.0)


@lru_cache(1 << 12)  # a ranking asks for the same chain many times
def fastest_cut(chain: tuple[BlockCost, ...], stages: int, workers: Workers) -> tuple[int, ...]:
    return best_cut(chain, workers, stages).blocks


@lru_cache(1 << 12)
def smallest_cut(
    chain: tuple[BlockCost, ...], workers: Workers, per_weight: float, held: tuple[int, ...], stashed: bool
) -> tuple[int, ...]:
    """The cut whose largest stage needs the least memory, where each stage holds so many micro-batches."""
    stages = len(held)
    holding = Holding(per_weight=per_weight, held=lambda to_come: held[stages - to_come], stashed=stashed)
    return least_demanding(chain, workers, stages, holding).blocks


@cache
def compile_schedule(
    schedule: str, stages: int, pieces: int, chunks: int, slices: int = 1
) -> tuple[tuple[int, int, float, int], ...]:
    """A schedule as numbers, in a possible order of execution. Each entry: worker; 2 x chunk, plus 1 for backward;
    share of that work; and the entry of another worker whose result it waits for, or -1. (What it needs of its own
    worker ended before that worker was free.)"""
    check_schedule(schedule, stages, pieces, chunks)
    to_do = [iter(sliced_steps(one_worker(schedule, own, stages, pieces, chunks), slices)) for own in range(stages)]
    last = stages * chunks - 1  # chunk c is on worker c modulo `stages`
    forwards, gradients = ([[-1] * pieces * slices for _ in range(last + 1)] for _ in range(2))  # [chunk][piece]: entry
    done: list[tuple[int, int, float, int]] = []
    steps = [next(own, None) for own in to_do]
    while any(steps):
        before = len(done)
        for worker, step in enumerate(steps):
            while step:
                kind, piece, chunk = step
                source = -1
                if kind is Kind.FORWARD:
                    if chunk and (source := forwards[chunk - 1][piece]) < 0:
                        break
                    forwards[chunk][piece] = len(done)
                elif kind is not Kind.WEIGHTS:
                    if chunk < last and (source := gradients[chunk + 1][piece]) < 0:
                        break
                    gradients[chunk][piece] = len(done)
                share = 0.5 if kind in HALVES else 1.0
                done.append((worker, 2 * chunk + (kind is not Kind.FORWARD), share, source if stages > 1 else -1))
                step = next(to_do[worker], None)
            steps[worker] = step
        if len(done) == before:
            raise ValueError(f"{schedule} with {stages} stages, {pieces} pieces and {chunks} chunks never ends")
    return tuple(done)


def schedule_seconds(
    schedule: str,
    stages: int,
    pieces: int,
    chunks: int,
    seconds: tuple[tuple[float, float], ...],
    carried: float,
    slices: int = 1,
) -> float:
    """Seconds of the whole schedule, as `schedule.timeline_of` finds them, in a fraction of the time."""
    spent = [one for both in seconds for one in both]
    free = [0.0] * stages
    ended: list[float] = []
    for worker, place, share, source in compile_schedule(schedule, stages, pieces, chunks, slices):
        begin = free[worker]
        if source >= 0 and (come := ended[source] + carried) > begin:
            begin = come
        free[worker] = end = begin + share * spent[place]
        ended.append(end)
    return max(free)
