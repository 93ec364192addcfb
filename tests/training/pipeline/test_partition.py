"""Cuts of a chain: the program finds what trying every cut finds, with links, memory and copies of stages."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, pairwise, product
from math import ceil, inf

import pytest

from shoestring.core.errors import Mistake
from shoestring.core.ledger_parts import Workers
from shoestring.training.pipeline.partition import (
    BlockCost,
    Holding,
    NothingFits,
    all_forward_first,
    best_cut,
    by_hand,
    by_parameters,
    by_time,
    least_demanding,
    one_forward_one_backward,
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


def stage_seconds(chain: list[BlockCost], begin: int, end: int, copies: int, workers: Workers, pieces: int) -> float:
    """The formula of the module, written down again for one stage."""
    work = sum(layer.forward + layer.backward for layer in chain[begin:end])
    weights = sum(layer.weights for layer in chain[begin:end])
    adding = workers.seconds(2 * (copies - 1) / copies * weights, 2 * (copies - 1)) / pieces
    before = chain[begin] if begin else None
    after = chain[end] if end < len(chain) else None
    if workers.hides:
        both = [
            workers.seconds(layer.crossing, 1) + workers.seconds(layer.returning, 1)
            for layer in (before, after)
            if layer is not None
        ]
        return max(work / copies + adding, max(both, default=0.0) / copies)
    sent = (workers.seconds(before.returning, 1) if before else 0.0) + (
        workers.seconds(after.crossing, 1) if after else 0.0
    )
    return (work + sent) / copies + adding


def stage_bytes(chain: list[BlockCost], begin: int, end: int, copies: int, to_come: int, holding: Holding) -> float:
    weights = sum(layer.weights for layer in chain[begin:end])
    held = ceil(holding.held(to_come) / copies)
    return (
        weights * (holding.per_weight + (held - 1 if holding.stashed else 0))
        + sum(layer.kept for layer in chain[begin:end]) * held
    )


def tried(
    chain: list[BlockCost], workers: Workers, numbers: range, copied: bool, pieces: int, holding: Holding
) -> list[tuple[float, float]]:
    """Of every cut with every number of copies: the slowest stage's seconds, the largest stage's bytes."""
    found = []
    for stages in numbers:
        for cut in all_cuts(len(chain), stages):
            for copies in product(range(1, workers.world + 1 if copied else 2), repeat=stages):
                if sum(copies) <= workers.world:
                    begins = [sum(cut[:number]) for number in range(stages + 1)]
                    found.append(
                        (
                            max(
                                stage_seconds(chain, begin, end, r, workers, pieces)
                                for (begin, end), r in zip(pairwise(begins), copies, strict=True)
                            ),
                            max(
                                stage_bytes(chain, begin, end, r, stages - number, holding)
                                for number, ((begin, end), r) in enumerate(zip(pairwise(begins), copies, strict=True))
                            ),
                        )
                    )
    return found


@pytest.mark.parametrize("seed", range(200))
def test_on_uneven_chains_the_program_equals_trying_every_cut(seed: int) -> None:
    draw = random.Random(seed)
    copied = seed % 2 == 1
    chain = drawn_chain(draw, draw.randint(2, 6 if copied else 9))
    workers = Workers(
        world=draw.randint(1, 5 if copied else 6),
        per_byte_sent=draw.choice((0.0, 0.1, 1.5)),
        per_message=draw.choice((0.0, 2.0)),
        hides=draw.random() < 0.5,
    )
    pieces = draw.choice((1, 2, 4, 16))
    stages = draw.choice((0, draw.randint(1, min(len(chain), workers.world))))
    held = draw.choice((one_forward_one_backward(pieces), all_forward_first(pieces)))
    holding = Holding(inf, per_weight=draw.choice((1, 3, 4)), held=held, stashed=draw.random() < 0.3)
    ways = tried(
        chain, workers, range(stages or 1, (stages or min(len(chain), workers.world)) + 1), copied, pieces, holding
    )
    least, most = min(need for _, need in ways), max(need for _, need in ways)
    for memory in (inf, most, (least + most) // 2, least):
        limited = Holding(memory, holding.per_weight, held, holding.stashed)
        cut = best_cut(chain, workers, stages, copied=copied, pieces=pieces, holding=limited)
        assert cut.seconds == pytest.approx(min(seconds for seconds, need in ways if need <= memory), rel=1e-12)
        assert max(cut.memory) <= memory and sum(cut.copies) <= workers.world and len(cut.blocks) == len(cut.copies)
        begins = [sum(cut.blocks[:number]) for number in range(len(cut.blocks) + 1)]
        spans = list(zip(pairwise(begins), cut.copies, strict=True))
        assert begins[-1] == len(chain) and min(cut.blocks) > 0
        assert cut.seconds == pytest.approx(
            max(stage_seconds(chain, *span, r, workers, pieces) for span, r in spans), rel=1e-12
        )
        assert cut.memory == tuple(
            stage_bytes(chain, *span, r, len(spans) - number, limited) for number, (span, r) in enumerate(spans)
        )
    if stages and not copied:
        assert max(least_demanding(chain, workers, stages, holding).memory) == least
    with pytest.raises(NothingFits) as nothing:
        best_cut(
            chain,
            workers,
            stages,
            copied=copied,
            pieces=pieces,
            holding=Holding(least - 1, holding.per_weight, held, holding.stashed),
        )
    assert nothing.value.least == least


@pytest.mark.parametrize("seed", range(30))
def test_cuts_by_time_and_by_parameters_have_the_smallest_maximum(seed: int) -> None:
    draw = random.Random(seed)
    chain = drawn_chain(draw, draw.randint(1, 10))
    stages = draw.randint(1, len(chain))

    def largest(cut: tuple[int, ...], values: list[float]) -> float:
        assert sum(cut) == len(values)
        return max(sum(values[sum(cut[:number]) : sum(cut[: number + 1])]) for number in range(len(cut)))

    for cut, values in (
        (by_time(chain, stages), [layer.seconds for layer in chain]),
        (by_parameters(chain, stages), [layer.weights for layer in chain]),
    ):
        assert len(cut) == stages
        assert largest(cut, values) == min(largest(one, values) for one in all_cuts(len(chain), stages))


def test_the_first_stages_get_fewer_blocks_where_memory_is_tight_because_1f1b_holds_more_there() -> None:
    chain = [BlockCost("b", forward=1, backward=2, weights=10, kept=10) for _ in range(12)]
    free = best_cut(chain, Workers(world=3), 3, pieces=8)
    tight = best_cut(chain, Workers(world=3), 3, pieces=8, holding=Holding(120, held=one_forward_one_backward(8)))
    assert free.blocks == (4, 4, 4) and tight.blocks == (3, 4, 5)
    assert tight.memory == (3 * 10 + 3 * 10 * 3, 4 * 10 + 4 * 10 * 2, 5 * 10 + 5 * 10)


def test_a_slow_link_moves_the_cut_to_where_little_crosses() -> None:
    chain = [
        BlockCost("b", forward=1, backward=1, crossing=wide, returning=wide) for wide in (0, 100, 100, 5, 100, 100)
    ]
    assert by_time(chain, 2) == (3, 3)
    chain = [
        BlockCost("b", forward=1, backward=1, crossing=wide, returning=wide) for wide in (0, 100, 5, 100, 100, 100)
    ]
    assert best_cut(chain, Workers(world=2, per_byte_sent=0.1), 2).blocks == (2, 4)
    assert best_cut(chain, Workers(world=2, per_byte_sent=0.001), 2).blocks == (3, 3)


def test_a_slow_block_gets_copies_of_its_stage() -> None:
    chain = [BlockCost("stem", forward=1), BlockCost("slow", forward=6), BlockCost("head", forward=1)]
    cut = best_cut(chain, Workers(world=4), copied=True)
    assert cut.seconds == 2.0 and sum(cut.copies) <= 4


def test_a_balance_by_hand_that_does_not_add_up_is_refused() -> None:
    assert by_hand(8, [3, 5]) == (3, 5)
    with pytest.raises(Mistake, match="places 9 blocks, and the model has 8"):
        by_hand(8, [4, 5])
    with pytest.raises(Mistake, match="one block or more"):
        by_hand(8, [8, 0])
    with pytest.raises(Mistake, match="one block or more"):
        by_hand(8, [])


def test_more_stages_than_blocks_or_workers_are_refused() -> None:
    with pytest.raises(Mistake, match="ask for 2 stages or fewer"):
        by_time([BlockCost("a"), BlockCost("b")], 3)
    with pytest.raises(Mistake, match="ask for 1 stages or fewer"):
        best_cut([BlockCost("a"), BlockCost("b")], Workers(world=1), 2)


def test_where_nothing_fits_the_least_memory_that_would_is_said() -> None:
    chain = [BlockCost("b", forward=1, weights=1 << 20) for _ in range(4)]
    with pytest.raises(NothingFits, match=r"no cut of 4 blocks over 2 stages fits 4.*the best of them needs 8\.00 MiB"):
        best_cut(chain, Workers(world=2), 2, holding=Holding(4 << 20, per_weight=4))
