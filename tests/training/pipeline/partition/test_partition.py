"""Cuts of a chain: the program finds what trying every cut finds, with links and memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from math import inf

import pytest

from shoestring.core.costs.ledger_parts import Workers
from shoestring.core.errors import Mistake
from shoestring.training.pipeline.partition.partition import (
    BlockCost,
    Holding,
    NothingFits,
    best_cut,
    least_demanding,
    smallest_maximum,
)


def drawn_chain(draw: random.Random, count: int) -> list[BlockCost]:
    """Uneven blocks: some take ten times as long as others, some have no weights."""
    return [
        BlockCost(
            f"b{number}",
            forward=draw.choice((1, 2, 3, 10)),
            backward=draw.randint(1, 20),
            weights=draw.choice((0, 5, 40, 100)),
            kept=draw.randint(0, 30),
            crossing=draw.randint(1, 20),
            returning=draw.choice((0, 10)),
        )
        for number in range(count)
    ]


def all_cuts(count: int, stages: int) -> Iterator[tuple[int, ...]]:
    for inner in combinations(range(1, count), stages - 1):
        yield tuple(end - begin for begin, end in pairwise((0, *inner, count)))


def stage_seconds(chain: list[BlockCost], begin: int, end: int, workers: Workers) -> float:
    """The formula of the module, written down again for one stage."""
    work = sum(layer.forward + layer.backward for layer in chain[begin:end])
    before = chain[begin] if begin else None
    after = chain[end] if end < len(chain) else None
    if workers.hides:
        both = [
            workers.seconds(layer.crossing, 1) + workers.seconds(layer.returning, 1)
            for layer in (before, after)
            if layer is not None
        ]
        return max(work, max(both, default=0.0))
    return (
        work
        + (workers.seconds(before.returning, 1) if before else 0.0)
        + (workers.seconds(after.crossing, 1) if after else 0.0)
    )


def stage_bytes(chain: list[BlockCost], begin: int, end: int, to_come: int, holding: Holding) -> float:
    weights, held = sum(layer.weights for layer in chain[begin:end]), holding.held(to_come)
    return (
        weights * (holding.per_weight + (held - 1 if holding.stashed else 0))
        + sum(layer.kept for layer in chain[begin:end]) * held
    )


def tried(chain: list[BlockCost], workers: Workers, stages: int, holding: Holding) -> list[tuple[float, float]]:
    """Of every cut: the slowest stage's seconds, the largest stage's bytes."""
    found = []
    for cut in all_cuts(len(chain), stages):
        spans = list(pairwise(sum(cut[:number]) for number in range(stages + 1)))
        found.append(
            (
                max(stage_seconds(chain, *span, workers) for span in spans),
                max(stage_bytes(chain, *span, stages - number, holding) for number, span in enumerate(spans)),
            )
        )
    return found


@pytest.mark.parametrize("seed", range(200))
def test_on_uneven_chains_the_program_equals_trying_every_cut(seed: int) -> None:
    draw = random.Random(seed)
    chain = drawn_chain(draw, draw.randint(2, 9))
    stages, pieces = draw.randint(1, min(len(chain), 6)), draw.choice((1, 2, 4, 16))
    sending = draw.choice((0.0, 0.1, 1.5)), draw.choice((0.0, 2.0))
    workers = Workers(per_byte_sent=sending[0], per_message=sending[1], hides=draw.random() < 0.5)
    held = draw.choice((lambda to_come: min(pieces, to_come), lambda to_come: pieces))  # of 1F1B, of GPipe
    holding = Holding(inf, draw.choice((1, 3, 4)), held, stashed=draw.random() < 0.3)
    ways = tried(chain, workers, stages, holding)
    least, most = min(need for _, need in ways), max(need for _, need in ways)
    for memory in (inf, most, (least + most) // 2, least):
        limited = replace(holding, memory=memory)
        cut = best_cut(chain, workers, stages, holding=limited)
        assert cut.seconds == pytest.approx(min(seconds for seconds, need in ways if need <= memory), rel=1e-12)
        assert max(cut.memory) <= memory and len(cut.blocks) == stages and min(cut.blocks) > 0
        spans = list(pairwise(sum(cut.blocks[:number]) for number in range(stages + 1)))
        assert spans[-1][1] == len(chain)
        assert cut.seconds == pytest.approx(max(stage_seconds(chain, *span, workers) for span in spans), rel=1e-12)
        assert cut.memory == tuple(
            stage_bytes(chain, *span, stages - number, limited) for number, span in enumerate(spans)
        )
    assert max(least_demanding(chain, workers, stages, holding).memory) == least
    with pytest.raises(NothingFits) as nothing:
        best_cut(chain, workers, stages, holding=replace(holding, memory=least - 1))
    assert nothing.value.least == least


@pytest.mark.parametrize("seed", range(30))
def test_a_cut_of_numbers_has_the_smallest_maximum(seed: int) -> None:
    draw = random.Random(seed)
    values = [layer.weights for layer in drawn_chain(draw, draw.randint(1, 10))]
    stages = draw.randint(1, len(values))

    def largest(cut: tuple[int, ...]) -> float:
        assert sum(cut) == len(values)
        return max(sum(values[sum(cut[:number]) : sum(cut[: number + 1])]) for number in range(len(cut)))

    assert largest(smallest_maximum(values, stages)) == min(map(largest, all_cuts(len(values), stages)))


def test_the_first_stages_get_fewer_blocks_where_memory_is_tight_because_1f1b_holds_more_there() -> None:
    chain = [BlockCost("b", forward=1, backward=2, weights=10, kept=10) for _ in range(12)]
    free = best_cut(chain, Workers(), 3)
    tight = best_cut(chain, Workers(), 3, holding=Holding(120, held=lambda to_come: min(8, to_come)))
    assert free.blocks == (4, 4, 4) and tight.blocks == (3, 4, 5)
    assert tight.memory == (3 * 10 + 3 * 10 * 3, 4 * 10 + 4 * 10 * 2, 5 * 10 + 5 * 10)


def test_a_slow_link_moves_the_cut_to_where_little_crosses() -> None:
    chain = [
        BlockCost("b", forward=1, backward=1, crossing=wide, returning=wide) for wide in (0, 100, 100, 5, 100, 100)
    ]
    assert best_cut(chain, Workers(), 2).blocks == (3, 3)
    chain = [
        BlockCost("b", forward=1, backward=1, crossing=wide, returning=wide) for wide in (0, 100, 5, 100, 100, 100)
    ]
    assert best_cut(chain, Workers(per_byte_sent=0.1), 2).blocks == (2, 4)
    assert best_cut(chain, Workers(per_byte_sent=0.001), 2).blocks == (3, 3)


def test_more_stages_than_blocks_are_refused() -> None:
    for stages in (0, 3):
        with pytest.raises(Mistake, match="ask for 2 stages or fewer"):
            best_cut([BlockCost("a"), BlockCost("b")], Workers(), stages)


def test_where_nothing_fits_the_least_memory_that_would_is_said() -> None:
    chain = [BlockCost("b", forward=1, weights=1 << 20) for _ in range(4)]
    with pytest.raises(NothingFits, match=r"no cut of 4 blocks over 2 stages fits 4.*the best of them needs 8\.00 MiB"):
        best_cut(chain, Workers(), 2, holding=Holding(4 << 20, per_weight=4))
