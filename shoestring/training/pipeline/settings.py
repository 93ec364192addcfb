"""Which pipelines are worth trying for some workers: stages, micro-batches, schedules and cuts that no other beats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf

from shoestring.core.costs.ledger import Ledger
from shoestring.training.pipeline.cost import STASHING, Pipe, fastest_cut, smallest_cut, units_of
from shoestring.training.pipeline.schedule import activation_counts_by_formula

MOST_PIECES = 64  # largest number of micro-batches that is tried,
TRIED = (
    ("1f1b", "zero-bubble", "interleaved", "gpipe"),
)  # and schedules of the same exactness; of equally good ones, the first


@dataclass(frozen=True)
class PipelineSetting:
    """The knobs of a pipeline."""

    stages: int
    pieces: int
    schedule: str
    balance: tuple[int, ...]
    chunks: int = 1


def worth_trying(ledger: Ledger) -> Iterator[PipelineSetting]:
    """Pipelines for these workers that no other beats in both time and memory, compared at equal stages and exactness:
    every number of stages that divides the workers, several numbers of micro-batches, and two cuts, the fastest and the
    smallest."""
    world, calls = ledger.workers.world, len(ledger.inside)
    for stages in (number for number in range(2, min(world, calls) + 1) if world % number == 0):
        copy = ledger.by_fewer_copies(stages)
        wholes = {pieces: copy.in_pieces(pieces) for pieces in numbers_of_pieces(stages, copy.batch)}
        for schedules in TRIED:
            found = [
                one
                for pieces, whole in wholes.items()
                for schedule in schedules
                if schedule != "zero-bubble" or ledger.slices == 1  # slices need a backward in one go
                for one in with_cuts(whole, stages, pieces, schedule, 2 if schedule == "interleaved" else 1)
            ]
            yield from (
                PipelineSetting(pipe.stages, pipe.pieces, pipe.schedule, pipe.cut, pipe.chunks)
                for pipe in pareto_front(found)
            )


def numbers_of_pieces(stages: int, samples: int) -> list[int]:
    """Numbers of micro-batches to try: with fewer than stages, workers are mostly idle; with many, each is small."""
    return [
        number for number in (stages, 2 * stages, 4 * stages, 8 * stages) if number <= min(samples, MOST_PIECES)
    ] or [max(samples, 1)]


def with_cuts(whole: Ledger, stages: int, pieces: int, schedule: str, chunks: int) -> Iterator[Pipe]:
    """The pipeline with the fastest cut, and with the cut that needs the least memory."""
    units = tuple(units_of(whole))
    chain, parts, standing = tuple(unit.layer for unit in units), stages * chunks, whole.standing
    if parts > len(units):
        return
    held = activation_counts_by_formula(schedule, stages, pieces, chunks)
    each = tuple(max(round(held[number % stages] / chunks), 1) for number in range(parts))
    per_weight = (standing.parameters + standing.optimizer + standing.gradients) / max(standing.parameters, 1.0)
    for cut in dict.fromkeys(
        (
            fastest_cut(chain, parts, whole.workers),
            smallest_cut(chain, whole.workers, per_weight, each, schedule == STASHING),
        )
    ):
        yield Pipe(whole, units, stages, pieces, schedule, cut)


def pareto_front(pipes: Sequence[Pipe]) -> Iterator[Pipe]:
    """The pipelines that no other beats in both time and memory, the fastest first.

    Schedules are played only for those that may be among them: one that is no faster than a pipeline found already,
    by its lower bound, and no smaller is left out.
    """
    least, queue = inf, [(pipe.least_step, number, False) for number, pipe in enumerate(pipes)]
    heapify(queue)
    while queue:
        _, number, played = heappop(queue)
        pipe = pipes[number]
        if played:
            peaks = map(pipe.peak, range(pipe.stages))
            if (peak := max(peaks)) < least:
                least = peak
                yield pipe
        elif all(pipe.peak(worker) < least for worker in range(pipe.stages)):
            heappush(queue, (pipe.step, number, True))
