"""The allocation is the best there is, never over a budget, and uses what there is."""

from __future__ import annotations

from itertools import pairwise, product

from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.compression.allocation.allocate import Option, fewest_bytes, frontier, least_damage, total

ONE = st.builds(
    Option, st.just("x"), st.integers(1, 60), st.floats(0, 1, allow_nan=False), st.sampled_from([-0.3, 0.0, 0.1, 0.5])
)
SOME = st.dictionaries(st.sampled_from("abcd"), st.lists(ONE, min_size=1, max_size=4), min_size=1)


@settings(max_examples=150, deadline=None)
@given(SOME, st.integers(1, 200))
def test_no_other_choice_within_the_bytes_damages_less(options: dict[str, list[Option[str]]], budget: int) -> None:
    found = least_damage(options, budget)
    fitting = [
        sum(one.damage for one in some)
        for some in product(*options.values())
        if sum(one.bytes for one in some) <= budget
    ]
    assert (found is None) == (not fitting)
    if found is not None:
        assert total(found)[0] <= budget and total(found)[1] <= min(fitting) + 1e-9


@settings(max_examples=100, deadline=None)
@given(SOME, st.floats(0, 2))
def test_no_other_choice_within_the_damage_is_smaller(options: dict[str, list[Option[str]]], damage: float) -> None:
    found = fewest_bytes(options, damage)
    fitting = [
        sum(one.bytes for one in some)
        for some in product(*options.values())
        if sum(one.damage for one in some) <= damage
    ]
    assert (found is None) == (not fitting)
    if found is not None:
        assert total(found)[1] <= damage and total(found)[0] == min(fitting)


@settings(max_examples=100, deadline=None)
@given(SOME, st.integers(20, 200), st.floats(0, 2))
def test_seconds_are_never_exceeded(options: dict[str, list[Option[str]]], budget: int, seconds: float) -> None:
    found = least_damage(options, budget, seconds)
    if found is not None:
        assert total(found)[0] <= budget and total(found)[2] <= seconds
    if sum(min(one.seconds for one in some) for some in options.values()) <= seconds and budget > 60 * len(options):
        assert found is not None, "bytes do not bind, so the quickest of all is one"


def test_a_frontier_falls() -> None:
    options = {
        str(number): [Option("x", 100 * bits, 0.01 * number / 2**bits) for bits in (2, 4, 8)] for number in range(1, 9)
    }
    points = [total(one) for one in frontier(options)]
    assert len(points) > 5 and all(one[0] < other[0] and one[1] > other[1] for one, other in pairwise(points))


def test_large_budgets_are_used() -> None:
    """Of thousands of units, less than a hundredth is wasted."""
    options = {
        str(number): [
            Option("x", bits * 12_345 * (number % 7 + 1) + number, 1 / (number + bits**2)) for bits in range(2, 9)
        ]
        for number in range(100)
    }
    most = sum(max(one.bytes for one in some) for some in options.values())
    for share in (0.35, 0.5, 0.9):
        found = least_damage(options, share * most)
        assert found is not None and 0.99 * share * most <= total(found)[0] <= share * most


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 50_000), min_size=40, max_size=120), st.floats(0, 0.02))
def test_many_weights_fit_into_little_more_than_their_least(sizes: list[int], more: float) -> None:
    """Rounding every weight's bytes up to a unit must not make the smallest options look too large."""
    options = {
        str(number): [Option("x", size * bits, 1 / (size + bits)) for bits in (2, 3, 8)]
        for number, size in enumerate(sizes)
    }
    least = 2 * sum(sizes)
    found = least_damage(options, least * (1 + more))
    assert found is not None and least <= total(found)[0] <= least * (1 + more)
    assert total(frontier(options, points=2)[0])[0] == least and least_damage(options, least - 1) is None
