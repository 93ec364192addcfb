"""What a pipeline costs by the ledger of the plain step: the seconds of its schedule, the bytes of each of its stages.

    samples     S workers hold one copy of the model, so a copy has S times the samples of a worker that holds one alone; in M pieces
    seconds     those of the schedule, played with each chunk's forward and backward; and the update of the largest stage
    memory      of stage s: its weights with gradients and optimizer state, and what it keeps of `held` pieces (parallel/schedule.py);
                PipeDream keeps the weights of every piece but the newest, too
    sent        M times what crosses the cuts: outputs forward, their gradients back

The ledger that comes out is that of the stage that needs most memory. A row of the ledger that is outside all blocks is computed with
the block after it, and what follows the last block with that one.
"""
from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import accumulate

from shoestring.core.ledger import Block, Ledger
from shoestring.core.ledger_parts import Traffic, Workers
from shoestring.core.staging import Staging, Work
from shoestring.parallel.partition import Holding, Layer, best_cut, least_demanding
from shoestring.parallel.schedule import Action, Kind, held_at_most, idle_share, needs, orders, timed

STASHING = "pipedream"     # the schedule in which every piece in flight keeps the weights that it began with


@dataclass(frozen=True)
class Unit:
    """What is cut: a block with what is computed around it, for one piece of a batch."""

    rows: tuple[Block, ...]
    weights: float             # bytes
    arriving: float            # bytes that come over a cut right before it

    @cached_property
    def layer(self) -> Layer:
        return Layer(self.rows[0].name, sum(row.forward for row in self.rows), sum(row.backward for row in self.rows), self.weights,
                     sum(row.kept for row in self.rows), self.arriving, self.arriving)


@dataclass(frozen=True)
class Pipe:
    """A step by a pipeline, costed."""

    ledger: Ledger             # of a whole copy of the model, in pieces
    units: tuple[Unit, ...]
    stages: int
    pieces: int
    schedule: str
    cut: tuple[int, ...]       # units of every chunk of the model: chunk c is on worker c modulo `stages`

    @property
    def chunks(self) -> int:
        """Of the model, on each worker."""
        return max(len(self.cut) // self.stages, 1)

    @cached_property
    def members(self) -> list[tuple[Unit, ...]]:
        """The units of every chunk."""
        ends = list(accumulate(self.cut))
        return [self.units[end - size:end] for end, size in zip(ends, self.cut, strict=True)]

    @cached_property
    def seconds(self) -> list[tuple[float, float]]:
        """Of every chunk for one piece: forward and backward, with what it sends where that takes the worker's time."""
        found, workers = [], self.ledger.workers
        for number, chunk in enumerate(self.members):
            forward, backward = (sum(one) for one in zip(*((unit.layer.forward, unit.layer.backward) for unit in chunk), strict=True))
            if not workers.hides and number + 1 < len(self.members):
                forward += workers.seconds(self.members[number + 1][0].arriving, 1)
            if not workers.hides and number:
                backward += workers.seconds(chunk[0].arriving, 1)
            found.append((forward, backward))
        return found

    @property
    def carried(self) -> float:
        """Seconds that a message is on its way, while both workers compute."""
        workers = self.ledger.workers
        return workers.seconds(max((chunk[0].arriving for chunk in self.members[1:]), default=0.0), 1) if workers.hides else 0.0

    @cached_property
    def step(self) -> float:
        """Seconds of all pieces, forward and backward."""
        if self.schedule == STASHING:   # the line never drains
            return self.pieces * max(sum(sum(self.seconds[chunk]) for chunk in self.of(worker)) for worker in range(self.stages))
        return played(self.schedule, self.stages, self.pieces, self.chunks, tuple(self.seconds), self.carried)

    def of(self, worker: int) -> range:
        """The chunks that a worker holds."""
        return range(worker, len(self.cut), self.stages)

    @property
    def bubble(self) -> float:
        busy = self.pieces * sum(forward + backward for forward, backward in self.seconds)
        return max(1 - busy / (self.stages * self.step), 0.0) if self.step else 0.0

    def stage(self, worker: int) -> Ledger:
        """The ledger of one worker of the line."""
        ledger, weights = self.ledger, sum(unit.weights for unit in self.units)
        own = [unit for chunk in self.of(worker) for unit in self.members[chunk]]
        share = sum(unit.weights for unit in own) / weights if weights else 1 / self.stages
        held = held_at_most(self.schedule, self.stages, self.pieces, self.chunks)[worker]
        kept = max(sum(unit.layer.kept for unit in self.members[chunk]) + (self.members[chunk][0].arriving if chunk else 0.0)
                   for chunk in self.of(worker))
        stashed = held - 1 if self.schedule == STASHING else 0
        standing, update = ledger.standing, ledger.update
        rows = tuple(row for unit in own for row in unit.rows)
        busy = self.pieces * sum(row.forward + row.backward for row in rows)
        slowest = max(sum(unit.weights for chunk in self.of(other) for unit in self.members[chunk]) for other in range(self.stages))
        waiting = max(self.step - busy, 0.0) + update.seconds * ((slowest / weights if weights else share) - share)
        return replace(
            ledger, blocks=rows, at_zero_batch=(),
            standing=replace(standing, parameters=standing.parameters * share * (1 + stashed), optimizer=standing.optimizer * share,
                             gradients=standing.gradients * share,
                             inputs=standing.inputs + (held - 1) * kept + (self.members[worker][0].arriving if worker else 0.0)),
            update=replace(update, seconds=update.seconds * share, rise=update.rise * share, call_seconds=update.call_seconds * share,
                           fused_seconds=None if update.fused_seconds is None else update.fused_seconds * share),
            splitting=replace(ledger.splitting, adding_seconds=ledger.splitting.adding_seconds * share),
            allocation=replace(ledger.allocation, allocated=ledger.allocation.allocated / self.stages),
            traffic=ledger.traffic + Traffic(sent=self.sent(worker), waiting=waiting))

    def sent(self, worker: int) -> float:
        """Bytes that a worker sends in a step: what leaves its chunks forward, and gradients of what came in."""
        return self.pieces * sum((self.members[chunk + 1][0].arriving if chunk + 1 < len(self.cut) else 0.0)
                                 + (self.members[chunk][0].arriving if chunk else 0.0) for chunk in self.of(worker))

    def largest(self) -> Ledger:
        """The ledger of the worker that needs most."""
        return max((self.stage(worker) for worker in range(self.stages)), key=lambda ledger: ledger.peak)

    def staging(self, why: str = "") -> Staging:
        """What is told of it, with the timeline."""
        forward_backward = self.seconds

        def seconds(action: Action) -> float:
            forward, backward = forward_backward[action.chunk]
            return forward if action.kind is Kind.FORWARD else backward if action.kind is Kind.BACKWARD else backward / 2

        timeline = timed(orders(self.schedule, self.stages, self.pieces, self.chunks), seconds, self.carried)
        bubble = self.bubble if self.schedule == STASHING else idle_share(timeline)
        return Staging(self.cut, self.schedule, self.pieces, bubble, tuple(
            tuple(Work(str(span.action.kind), span.action.piece, span.action.chunk, span.begin, span.end) for span in own)
            for own in timeline), why)


def piped(ledger: Ledger, stages: int, pieces: int, schedule: str, chunks: int = 1, balance: Sequence[int] = ()) -> Pipe:
    """The pipeline on this ledger, cut as given, or where the slowest chunk is fastest."""
    pieces = min(pieces, max(ledger.by_fewer_copies(stages).batch, 1))
    whole = ledger.by_fewer_copies(stages).in_pieces(pieces)
    units = tuple(units_of(whole))
    cut = tuple(balance) or fastest_cut(tuple(unit.layer for unit in units), stages * chunks, whole.workers)
    return Pipe(whole, units, stages, pieces, schedule, cut)


def units_of(ledger: Ledger) -> Iterator[Unit]:
    """The rows of a ledger by the block that they belong to. Weights are known by the gradients that they get; those that get none are
    taken to lie evenly. A block that is called again is with its first call."""
    known = {row.name: row.gradient for row in ledger.at_zero_batch or ledger.blocks}
    names = [row.name for row in ledger.blocks if row.inside and "#" not in row.name]
    place = {name: number for number, name in enumerate(names)}
    rows: list[list[Block]] = [[] for _ in names] or [[]]
    now = -1
    for row in ledger.blocks:
        if row.inside:
            now = place.get(re.sub("#[0-9]+", "", row.name), now)
        rows[min(now + (not row.inside), len(rows) - 1) if now >= 0 else 0].append(row)
    still = max(ledger.standing.parameters - sum(known.values()), 0.0) / len(rows)
    arriving = 0.0
    for own in rows:
        yield Unit(tuple(own), sum(known.get(row.name, 0.0) for row in own) + still, arriving)
        arriving = next((row.output for row in reversed(own) if row.inside), 0.0)


@lru_cache(1 << 12)   # a ranking asks for the same chain again and again
def fastest_cut(chain: tuple[Layer, ...], stages: int, workers: Workers) -> tuple[int, ...]:
    return best_cut(chain, replace(workers, world=stages), stages).blocks


@lru_cache(1 << 12)
def smallest_cut(chain: tuple[Layer, ...], workers: Workers, per_weight: float, held: tuple[int, ...], stashed: bool) -> tuple[int, ...]:
    """The cut whose largest stage needs the least memory, where each stage holds so many pieces."""
    stages = len(held)
    holding = Holding(per_weight=per_weight, held=lambda to_come: held[stages - to_come], stashed=stashed)
    return least_demanding(chain, workers, stages, holding).blocks


@cache
def compiled(schedule: str, stages: int, pieces: int, chunks: int) -> tuple[tuple[int, int, float, tuple[tuple[int, bool], ...]], ...]:
    """A schedule as numbers, in an order in which it can be done: worker, chunk with 0 for forward and 1 for backward, the share of that,
    and who comes before, by number, and whether it is another worker's."""
    order = orders(schedule, stages, pieces, chunks)
    owner = {action: worker for worker, own in enumerate(order) for action in own}
    last = stages * chunks - 1
    spans = timed(order, lambda action: 1.0)
    done = sorted(((span.begin, worker, place, span.action) for worker, own in enumerate(spans) for place, span in enumerate(own)),
                  key=lambda one: one[:3])
    numbers = {action: number for number, (_, _, _, action) in enumerate(done)}
    return tuple((worker, 2 * action.chunk + (action.kind is not Kind.FORWARD), 0.5 if action.kind in (Kind.INPUTS, Kind.WEIGHTS) else 1.0,
                  tuple((numbers[one], owner[one] != worker) for one in needs(action, last, owner)))
                 for _, worker, _, action in done)


def played(schedule: str, stages: int, pieces: int, chunks: int, seconds: tuple[tuple[float, float], ...], carried: float) -> float:
    """Seconds of the whole: what `schedule.timed` finds, in a fraction of the time."""
    spent = [one for both in seconds for one in both]
    free = [0.0] * stages
    ended: list[float] = []
    for worker, place, share, before in compiled(schedule, stages, pieces, chunks):
        begin = free[worker]
        for number, far in before:
            come = ended[number] + carried if far else ended[number]
            begin = max(begin, come)
        end = begin + share * spent[place]
        free[worker] = end
        ended.append(end)
    return max(free)
