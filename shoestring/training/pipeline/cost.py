"""What a pipeline costs by the ledger of the plain step: the seconds of its schedule, the bytes of each of its stages.

    samples     S workers hold one copy of the model, so a copy has S times the samples of a worker that holds one alone; in M pieces
    seconds     those of the schedule, played with each chunk's forward and backward; and the update of the largest stage
    memory      of stage s: its weights with gradients and optimizer state, and what it keeps of `held` pieces
    (training/pipeline/schedule.py);
                PipeDream keeps the weights that pieces on their way began with, too, and makes an update for every piece
    sent        M times what crosses the cuts: outputs forward, their gradients back

The ledger that comes out is that of the stage that needs most memory. What runs between two blocks is
computed by the worker of the first of them, as training/pipeline/walk.py does it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import accumulate
from math import inf

from shoestring.core.actions import HALVES, Action, Kind, idle_share
from shoestring.core.ledger import Block, Ledger
from shoestring.core.ledger_parts import Traffic, UpdateCost, Workers
from shoestring.core.staging import Staging, Work
from shoestring.training.pipeline.partition import BlockCost, Holding, best_cut, least_demanding, smallest_maximum
from shoestring.training.pipeline.schedule import doable, held_at_most, in_slices, orders, timed

RECEIVED = "(received)"  # the row of what comes from the stage before
MOST_PIECES = 64  # that are tried,
TRIED = (
    ("1f1b", "zero-bubble", "interleaved", "gpipe"),
)  # and schedules that are as exact as each other; of those as good, the first
HALVED = 1.3  # bytes of gradients that wait between the halves of a backward, per byte of activations (a GPT, measured)
STASHING = "pipedream"  # the schedule in which every piece in flight keeps the weights that it began with


@dataclass(frozen=True)
class CostUnit:
    """What is cut: a block with what is computed around it, for one piece of a batch."""

    rows: tuple[Block, ...]
    weights: float  # bytes
    arriving: float  # bytes that come over a cut right before it

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
    """A step by a pipeline, costed."""

    ledger: Ledger  # of a whole copy of the model, in pieces
    units: tuple[CostUnit, ...]
    stages: int
    pieces: int
    schedule: str
    cut: tuple[int, ...]  # units of every chunk of the model: chunk c is on worker c modulo `stages`
    vertical: bool = False  # of pipedream: pieces meet everywhere the weights of the version that they began with
    flush: int = 1  # steps of pipedream from one time that the line drains to the next

    @property
    def chunks(self) -> int:
        """Of the model, on each worker."""
        return max(len(self.cut) // self.stages, 1)

    @cached_property
    def members(self) -> list[tuple[CostUnit, ...]]:
        """The units of every chunk."""
        ends = list(accumulate(self.cut))
        return [self.units[end - size : end] for end, size in zip(ends, self.cut, strict=True)]

    @cached_property
    def seconds(self) -> list[tuple[float, float]]:
        """Of every chunk for one piece, or the mean of its slices: forward and backward, with what it sends where that takes the worker's
        time."""
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
    def carried(self) -> float:
        """Seconds that a message is on its way, while both workers compute."""
        workers = self.ledger.workers
        largest = max((chunk[0].arriving for chunk in self.members[1:]), default=0.0) / self.ledger.slices
        return workers.seconds(largest, 1) if workers.hides else 0.0

    @cached_property
    def step(self) -> float:
        """Seconds of all pieces, forward and backward."""
        if self.schedule == STASHING:  # the line fills and drains once in `flush` steps
            each = [sum(sum(self.seconds[chunk]) for chunk in self.of(worker)) for worker in range(self.stages)]
            return self.pieces * max(each) + (sum(each) - max(each)) / self.flush
        return played(
            self.schedule, self.stages, self.pieces, self.chunks, tuple(self.seconds), self.carried, self.ledger.slices
        )

    def of(self, worker: int) -> range:
        """The chunks that a worker holds."""
        return range(worker, len(self.cut), self.stages)

    @property
    def bubble(self) -> float:
        busy = self.pieces * self.ledger.slices * sum(forward + backward for forward, backward in self.seconds)
        return max(1 - busy / (self.stages * self.step), 0.0) if self.step else 0.0

    def stage(self, worker: int) -> Ledger:
        """The ledger of one worker of the line."""
        ledger, own = self.ledger, [unit for chunk in self.of(worker) for unit in self.members[chunk]]
        share, held = self.shares[worker], held_at_most(self.schedule, self.stages, self.pieces, self.chunks)[worker]
        rows = tuple(row for unit in own for row in unit.rows)
        arriving = sum(self.members[chunk][0].arriving for chunk in self.of(worker) if chunk)
        received = (Block(RECEIVED, False, kept=arriving, rise=arriving),) if arriving else ()
        empty = {row.name: row for row in ledger.at_zero_batch}
        blocks = (*received, *rows)
        busy = self.pieces * sum(row.forward + row.backward for row in rows)
        standing, update = ledger.standing, self.update
        latest = update.seconds * (max(self.shares) - share)  # the largest stage's update is waited for
        return replace(
            ledger,
            blocks=blocks,
            at_zero_batch=tuple(empty.get(row.name, Block(row.name, False)) for row in blocks),
            in_flight=max((held - self.waiting(worker)) / self.chunks, 1.0),
            stretch=self.step / busy if busy else 1.0,
            standing=replace(
                standing,
                parameters=standing.parameters * share * self.versions(worker),
                optimizer=standing.optimizer * share,
                gradients=standing.gradients * share,
                inputs=standing.inputs + self.waiting(worker) * (1 + HALVED) * sum(row.kept for row in rows),
            ),
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
            + Traffic(sent=self.sent(worker), waiting=latest),
            workers=replace(ledger.workers, stages=self.stages),
        )

    def part_of(self, traffic: Traffic, share: float) -> Traffic:
        """What the blocks of a worker move, of what all blocks do."""
        return Traffic(*(share * one for one in (traffic.disk, traffic.disk_seconds, traffic.sent, traffic.waiting)))

    def versions(self, worker: int) -> int:
        """Of a stage's weights, that are kept at once."""
        if self.schedule != STASHING:
            return 1
        return held_at_most(self.schedule, self.stages, self.pieces)[0 if self.vertical else worker]

    @property
    def update(self) -> UpdateCost:
        """Of all weights in a step: with pipedream there is one for every piece. (Copying the weights that are kept is not counted.)"""
        one, times = self.ledger.update, self.pieces if self.schedule == STASHING else 1
        return replace(
            one,
            seconds=times * one.seconds,
            fused_seconds=None if one.fused_seconds is None else times * one.fused_seconds,
        )

    def waiting(self, worker: int) -> int:
        """Pieces between the two halves of their backward. Their activations stay, also those that were computed again, and so do the
        gradients of what was computed from them."""
        return min(worker, self.pieces - 1) if self.schedule == "zero-bubble" else 0

    @cached_property
    def shares(self) -> tuple[float, ...]:
        """Of all weights, that each worker holds."""
        whole = sum(unit.weights for unit in self.units)
        held = (
            sum(unit.weights for chunk in self.of(worker) for unit in self.members[chunk])
            for worker in range(self.stages)
        )
        return tuple(one / whole if whole else 1 / self.stages for one in held)

    def sent(self, worker: int) -> float:
        """Bytes that a worker sends in a step: what leaves its chunks forward, and gradients of what came in."""
        return self.pieces * sum(
            (self.members[chunk + 1][0].arriving if chunk + 1 < len(self.cut) else 0.0)
            + (self.members[chunk][0].arriving if chunk else 0.0)
            for chunk in self.of(worker)
        )

    def largest(self) -> Ledger:
        """The ledger of the worker that needs most."""
        return max((self.stage(worker) for worker in range(self.stages)), key=lambda ledger: ledger.peak)

    def staging(self, after: Ledger) -> Staging:
        """What is told of it, with the timeline. `after` is the ledger of the worker that needs most under the whole plan: what other
        techniques add to the seconds of its blocks, they add to all."""
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
        timeline = timed(order, seconds, self.carried)
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
            tuple(self.stage(worker).peak for worker in range(self.stages)),
            names=tuple(row.name for unit in self.units for row in unit.rows if row.inside),
        )


def piped(
    ledger: Ledger,
    stages: int,
    pieces: int,
    schedule: str,
    chunks: int = 1,
    balance: Sequence[int] = (),
    vertical: bool = False,
    flush: int = 1,
) -> Pipe:
    """The pipeline on the ledger of a plain step, cut as given, or into parts with as equal weights as can be."""
    copy = ledger.by_fewer_copies(stages)
    pieces = min(pieces, max(copy.batch, 1))
    whole = copy.in_pieces(pieces)
    units = tuple(units_of(whole))
    cut = tuple(balance) or smallest_maximum([unit.weights for unit in units], stages * chunks)
    return Pipe(whole, units, stages, pieces, schedule, cut, vertical, flush)


@dataclass(frozen=True)
class PipelineSetting:
    """The knobs of a pipeline."""

    stages: int
    pieces: int
    schedule: str
    balance: tuple[int, ...]
    chunks: int = 1


def worth_trying(ledger: Ledger) -> Iterator[PipelineSetting]:
    """Pipelines for these workers that nothing beats in both time and memory, among those with as many stages that are as exact: every
    number of stages that divides the workers, some numbers of pieces, and two cuts, the fastest and the smallest."""
    world, calls = ledger.workers.world, len(ledger.inside)
    for stages in (number for number in range(2, min(world, calls) + 1) if world % number == 0):
        copy = ledger.by_fewer_copies(stages)
        wholes = {pieces: copy.in_pieces(pieces) for pieces in numbers_of_pieces(stages, copy.batch)}
        for schedules in TRIED:
            found = [
                one
                for pieces, whole in wholes.items()
                for schedule in schedules
                if schedule != "zero-bubble" or ledger.slices == 1  # slices go backward at once
                for one in with_cuts(whole, stages, pieces, schedule, 2 if schedule == "interleaved" else 1)
            ]
            yield from (
                PipelineSetting(pipe.stages, pipe.pieces, pipe.schedule, pipe.cut, pipe.chunks)
                for pipe in unbeaten(found)
            )


def numbers_of_pieces(stages: int, samples: int) -> list[int]:
    """Of a batch, that are tried: with fewer than stages a worker is idle for most of the time, with many each is small."""
    return [
        number for number in (stages, 2 * stages, 4 * stages, 8 * stages) if number <= min(samples, MOST_PIECES)
    ] or [max(samples, 1)]


def with_cuts(whole: Ledger, stages: int, pieces: int, schedule: str, chunks: int) -> Iterator[Pipe]:
    """The pipeline with the fastest cut and with the one that needs the least memory."""
    units = tuple(units_of(whole))
    chain, parts, standing = tuple(unit.layer for unit in units), stages * chunks, whole.standing
    if parts > len(units):
        return
    held = held_at_most(schedule, stages, pieces, chunks)
    each = tuple(max(round(held[number % stages] / chunks), 1) for number in range(parts))
    per_weight = (standing.parameters + standing.optimizer + standing.gradients) / max(standing.parameters, 1.0)
    for cut in dict.fromkeys(
        (
            fastest_cut(chain, parts, whole.workers),
            smallest_cut(chain, whole.workers, per_weight, each, schedule == STASHING),
        )
    ):
        yield Pipe(whole, units, stages, pieces, schedule, cut)


def unbeaten(pipes: Sequence[Pipe]) -> Iterator[Pipe]:
    """Those that no other beats in both time and memory, the fastest first."""
    least = inf
    for pipe in sorted(pipes, key=lambda pipe: pipe.step):
        if (peak := pipe.largest().peak) < least:
            least = peak
            yield pipe


def units_of(ledger: Ledger) -> Iterator[CostUnit]:
    """The rows of a ledger by the call of a block that they belong to. Weights are known by the gradients that they get; those that get
    none are taken to lie evenly."""
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


@lru_cache(1 << 12)  # a ranking asks for the same chain again and again
def fastest_cut(chain: tuple[BlockCost, ...], stages: int, workers: Workers) -> tuple[int, ...]:
    return best_cut(chain, replace(workers, world=stages), stages).blocks


@lru_cache(1 << 12)
def smallest_cut(
    chain: tuple[BlockCost, ...], workers: Workers, per_weight: float, held: tuple[int, ...], stashed: bool
) -> tuple[int, ...]:
    """The cut whose largest stage needs the least memory, where each stage holds so many pieces."""
    stages = len(held)
    holding = Holding(per_weight=per_weight, held=lambda to_come: held[stages - to_come], stashed=stashed)
    return least_demanding(chain, workers, stages, holding).blocks


@cache
def compiled(
    schedule: str, stages: int, pieces: int, chunks: int, slices: int = 1
) -> tuple[tuple[int, int, float, tuple[tuple[int, bool], ...]], ...]:
    """A schedule as numbers, in an order in which it can be done: worker, chunk with 0 for forward and 1 for backward, the share of that,
    and who comes before, by number, and whether it is another worker's."""
    numbers: dict[Action, tuple[int, int]] = {}  # by action: its number, and who does it
    done = []
    for worker, action, needed in doable(in_slices(orders(schedule, stages, pieces, chunks), slices)):
        known = [numbers[one] for one in needed]
        done.append(
            (
                worker,
                2 * action.chunk + (action.kind is not Kind.FORWARD),
                0.5 if action.kind in HALVES else 1.0,
                tuple([(number, owner != worker) for number, owner in known]),
            )
        )
        numbers[action] = len(numbers), worker
    return tuple(done)


def played(
    schedule: str,
    stages: int,
    pieces: int,
    chunks: int,
    seconds: tuple[tuple[float, float], ...],
    carried: float,
    slices: int = 1,
) -> float:
    """Seconds of the whole: what `schedule.timed` finds, in a fraction of the time."""
    spent = [one for both in seconds for one in both]
    free = [0.0] * stages
    ended: list[float] = []
    for worker, place, share, before in compiled(schedule, stages, pieces, chunks, slices):
        begin = free[worker]
        for number, far in before:
            come = ended[number] + carried if far else ended[number]
            begin = max(begin, come)
        end = begin + share * spent[place]
        free[worker] = end
        ended.append(end)
    return max(free)
