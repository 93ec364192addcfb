"""Which requests make a batch: every one once, the oldest of the most urgent always, and no more than the budget holds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoestring.serving.batching.policy import SIMILAR, SKIPPED, Batching, Waiting, choose_batch, next_batch

LINES = st.lists(
    st.builds(
        Waiting,
        length=st.sampled_from((3, 4, 4, 5, 12, 40)),
        arrived=st.integers(0, 9).map(float),
        urgency=st.integers(0, 2),
        deadline=st.sampled_from([4.0, 5.0, 6.0, float("inf")]),
    ),
    min_size=3,
    max_size=12,
)
WAYS = st.builds(Batching, tokens=st.sampled_from((1, 8, 20, 60)), rows=st.integers(1, 4), packed=st.booleans())
NOW = 5.0


def size(lengths: list[int], how: Batching) -> int:
    return sum(lengths) if how.packed else len(lengths) * max(lengths)


@given(LINES, WAYS)
def test_a_batch_holds_the_first_and_keeps_the_budget(waiting: list[Waiting], how: Batching) -> None:
    chosen = next_batch(waiting, how, NOW)
    alive = [place for place, one in enumerate(waiting) if one.deadline >= NOW]
    assert bool(chosen) == bool(alive), "nobody waits for a batch to fill"
    if not chosen:
        return
    assert len(set(chosen)) == len(chosen) <= how.rows and set(chosen) <= set(alive)
    first = min(alive, key=lambda place: (-waiting[place].urgency, waiting[place].arrived, place))
    assert chosen[0] == first
    lengths = [waiting[place].length for place in chosen]
    assert len(chosen) == 1 or size(lengths, how) <= how.tokens, "only one request alone may be longer"
    assert how.packed or min(lengths) >= SIMILAR * max(lengths), "padding wastes a quarter at most"


@given(LINES, WAYS)
def test_who_is_passed_over_does_not_fit_with_those_before(waiting: list[Waiting], how: Batching) -> None:
    """Nobody is overtaken by a younger request of the same length: others join in order of urgency and age."""
    chosen = next_batch(waiting, how, NOW)
    order = sorted(
        (place for place, one in enumerate(waiting) if one.deadline >= NOW),
        key=lambda place: (-waiting[place].urgency, waiting[place].arrived),
    )
    assert chosen == sorted(chosen, key=order.index)
    for place in order[: order.index(chosen[-1])] if chosen else ():
        if place not in chosen:
            before = [waiting[one].length for one in chosen if order.index(one) < order.index(place)]
            lengths = [*before, waiting[place].length]
            alike = how.packed or min(lengths) >= SIMILAR * max(lengths)
            assert size(lengths, how) > how.tokens or not alike


@given(LINES, WAYS)
def test_batch_after_batch_serves_everybody_who_is_not_late(waiting: list[Waiting], how: Batching) -> None:
    left, served = list(waiting), []
    while batch := next_batch(left, how, NOW):
        served += [left[place] for place in batch]
        left = [one for place, one in enumerate(left) if place not in batch]
    assert all(one.deadline < NOW for one in left) and len(served) + len(left) == len(waiting)


def test_the_search_for_others_ends_after_some_that_do_not_fit() -> None:
    long = [100] * SKIPPED
    assert choose_batch([10, *long[1:], 10], Batching(tokens=20)) == [0, SKIPPED]
    assert choose_batch([10, *long, 10], Batching(tokens=20)) == [0]


def test_a_batch_of_one_row_is_one_request() -> None:
    assert choose_batch([3, 3, 3], Batching(tokens=100, rows=1)) == [0]
    assert choose_batch([3, 3, 3], Batching(tokens=100, rows=2, packed=True)) == [0, 1]
