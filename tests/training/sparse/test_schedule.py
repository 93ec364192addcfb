"""Shares of zeros over a training: they only rise, change where masks change, and end at what was asked for."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoestring.core.errors import Mistake
from shoestring.training.sparse.schedule import SparsitySchedule, make_schedule

SCHEDULES = st.builds(
    SparsitySchedule,
    share=st.floats(0.01, 0.99),
    begin=st.integers(0, 20),
    every=st.integers(1, 9),
    updates=st.integers(1, 12),
    amount=st.sampled_from((0.0, 0.0, 0.05, 0.3)),
    amount_of=st.sampled_from(("all", "left")),
)


@given(SCHEDULES)
def test_zeros_become_more_only_where_masks_change(one: SparsitySchedule) -> None:
    shares = [one.share_at(step) for step in range(one.end + 10)]
    for step, (before, after) in enumerate(pairwise(shares), 1):
        assert 0 <= before <= after <= one.share
        assert before == after or one.due(step), "between two changes the share is one"
    assert shares[one.begin] == 0.0 and shares[one.end] == shares[-1] == one.share
    assert sum(map(one.due, range(one.end + 10))) == one.updates


@given(
    st.floats(0.05, 0.95),
    st.integers(1, 2000),
    st.floats(0, 0.9),
    st.floats(0.05, 1),
    st.integers(0, 50),
    st.sampled_from((0.0, 0.02, 0.2)),
    st.sampled_from(("all", "left")),
)
def test_a_schedule_ends_within_its_part_of_the_training_or_is_refused(
    share: float, steps: int, begin: float, end: float, every: int, amount: float, amount_of: str
) -> None:
    try:
        found = make_schedule(share, steps, begin, end, every, amount, amount_of)
    except Mistake:
        return
    assert int(begin * steps) == found.begin and found.end <= int(end * steps) <= steps
    assert found.updates >= 1 and found.every >= 1 and found.share_at(found.end) == share
    assert not every or found.every == every
    if amount:  # one change fewer would not reach the share
        left = 1.0 if amount_of == "all" else None
        fewer = found.updates - 1
        reached = fewer * amount if left else 1 - (1 - amount) ** fewer
        assert reached < share + 1e-6


def test_cubic_prunes_most_while_there_is_most_to_spare() -> None:
    """s_t = 0.875 (1 - (1 - i/2)^3): by hand, 7/8 of 7/8 at half of the way."""
    one = SparsitySchedule(0.875, begin=4, every=2, updates=2)
    assert [one.share_at(step) for step in (4, 5, 6, 7, 8, 99)] == [0, 0, 0.765625, 0.765625, 0.875, 0.875]


def test_a_share_of_those_left_is_a_geometric_series() -> None:
    one = make_schedule(0.75, steps=100, begin=0.0, end=1.0, every=10, amount=0.5, amount_of="left")
    assert one.updates == 2 and [one.share_at(step) for step in (10, 20)] == [0.5, 0.75]


@pytest.mark.parametrize(
    "asked",
    [
        {"share": 0.0},
        {"share": 1.0},
        {"share": float("nan")},
        {"begin": 0.5, "end": 0.5},
        {"begin": float("nan")},
        {"end": 1.1},
        {"every": -1},
        {"every": 200},
        {"amount": 1.0},
        {"amount": float("nan")},
        {"amount": -0.1},
        {"amount": 0.1, "amount_of": "most"},
        {"amount": 0.001, "every": 10},
        {"steps": 1},
    ],
)
def test_what_no_training_can_reach_is_refused(asked: dict[str, float | str]) -> None:
    with pytest.raises(Mistake):
        make_schedule(**{"share": 0.9, "steps": 100, "begin": 0.1, "end": 0.9, "every": 0} | asked)  # type: ignore[arg-type]
