"""TeraPipe's dynamic program: as good as trying everything, and quick."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.core.errors import Mistake
from shoestring.training.sequence.slices import Seconds, best_slices, fit_times, latency


def compositions(length: int, granularity: int) -> Iterator[tuple[int, ...]]:
    """All ways to cut so many tokens at multiples of the granularity."""
    if length <= granularity:
        yield (length,)
        return
    for first in range(granularity, length, granularity):
        yield from ((first, *rest) for rest in compositions(length - first, granularity))
    yield (length,)


def table(seed: int) -> Seconds:
    """Times that follow no rule at all."""
    return lambda length, context: random.Random(f"{seed} {length} {context}").choice(
        [0.0, 1.0, 2.5, random.Random(seed).random()]
    )


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 22),
    stages=st.integers(1, 9),
    granularity=st.integers(1, 4),
    seed=st.integers(0, 10_000),
    samples=st.integers(1, 3),
)
def test_the_program_is_as_good_as_trying_everything(
    length: int, stages: int, granularity: int, seed: int, samples: int
) -> None:
    length = min(length, 11 * granularity)
    found = best_slices(table(seed), length, stages, granularity, samples)
    assert sum(found.lengths) == length
    assert found.lengths in set(compositions(length, granularity))
    assert found.seconds == pytest.approx(latency(found.lengths, table(seed), stages, samples))
    assert found.seconds == pytest.approx(
        min(latency(cut, table(seed), stages, samples) for cut in compositions(length, granularity))
    )


def test_later_slices_are_shorter_because_they_look_back_on_more() -> None:
    def cost(length: int, context: int) -> float:
        return 20 + length + length * (context + length / 2) / 500

    found = best_slices(cost, 2048, 12, 8)
    assert len(found.lengths) > 4
    assert found.lengths[0] > 2 * found.lengths[-2], found.lengths  # the last one is what is left
    assert found.seconds < min(latency((2048 // count,) * count, cost, 12) for count in (1, 2, 4, 8, 16, 32, 64))


def test_one_stage_has_no_use_for_slices_and_many_stages_have() -> None:
    cost: Seconds = lambda length, context: 1.0 + length  # noqa: E731
    assert best_slices(cost, 64, 1, 1).lengths == (64,)
    assert best_slices(cost, 64, 2, 1).lengths == (8,) * 8  # n + 64 + 1 + 64 / n is least at n = 8
    assert best_slices(cost, 64, 65, 1).lengths == (1,) * 64


def test_a_sequence_that_is_no_multiple_of_the_granularity_ends_with_a_short_slice() -> None:
    assert best_slices(lambda length, context: 1e-3 + length, 19, 50, 8).lengths == (8, 8, 3)


def test_a_fit_gives_back_what_it_was_made_of() -> None:
    def true(length: int, context: int) -> float:
        return (
            0.3 + 2e-3 * length + (0.01 + 1e-5 * length + 2e-5 * context + 3e-7 * length * context if context else 0.0)
        )

    pairs = [(length, 0) for length in (64, 128, 512)] + [
        (length, context) for length in (64, 256, 512) for context in (128, 1024)
    ]
    fit = fit_times({pair: true(*pair) for pair in pairs})
    for length in (16, 64, 100, 300, 1024):
        for context in (0, 64, 500, 2048):
            assert fit(length, context) == pytest.approx(true(length, context))
    with pytest.raises(Mistake, match="two and four are needed"):
        fit_times({(64, 0): 1.0, (128, 0): 2.0})


def test_times_that_are_no_times_are_refused() -> None:
    with pytest.raises(Mistake, match="must be a number"):
        best_slices(lambda length, context: -1.0, 16, 2)
    with pytest.raises(Mistake, match="1 or more"):
        best_slices(lambda length, context: 1.0, 16, 0)
