"""Limits are compared with figures in one place: broken exactly where more is used than there is."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoestring.core.budget import Budget, Limit
from shoestring.core.errors import Mistake

POSITIVE = st.floats(1e-6, 1e12)
LIMITED = [one for one in fields(Budget) if one.metadata]


@given(POSITIVE, POSITIVE, st.booleans())
def test_a_limit_is_kept_where_no_more_than_all_of_it_is_used(value: float, found: float, least: bool) -> None:
    one = Limit("one", "figure", "", value, least)
    assert one.keeps(found) == (found >= value if least else found <= value)
    if one.share_used(found) < 1 - 1e-9:
        assert one.keeps(found)
    if one.share_used(found) > 1 + 1e-9:
        assert not one.keeps(found)
    assert one.share_used(value) == 1.0 and one.keeps(value)
    if one.keeps(found):
        assert one.keeps(found, slack=1.5), "slack only ever allows more"


@pytest.mark.parametrize("name", [one.name for one in LIMITED])
def test_every_limit_is_checked_against_its_figure(name: str) -> None:
    field = next(one for one in LIMITED if one.name == name)
    figure, least = field.metadata["figure"], field.metadata["least"]
    budget = Budget(**{name: 4})
    (limit,) = budget.limits()
    assert (limit.name, limit.figure, limit.value) == (name, figure, 4)
    inside, outside = (5.0, 3.0) if least else (3.0, 5.0)
    assert (
        budget.broken_limits({figure: inside})
        == []
        == budget.broken_limits({figure: None})
        == budget.broken_limits({"other": outside})
    )
    assert [one.limit.name for one in budget.broken_limits({figure: outside})] == [name]
    assert budget.share_used({figure: inside}) < 1 < budget.share_used({figure: outside})
    assert ("less than" if least else "more than") in str(budget.broken_limits({figure: outside})[0])


def test_each_figure_has_one_limit() -> None:
    figures = [one.metadata["figure"] for one in LIMITED]
    assert len(set(figures)) == len(figures)


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        ({"memory": "1KiB", "seconds": "2m"}, Budget(memory=1024, seconds=120.0)),
        ({"memory": 1024, "seconds": 120}, Budget(memory=1024, seconds=120.0)),
        ({"quality": "99.8%"}, Budget(quality=0.998)),
        ({"quality": "1"}, Budget(quality=1.0)),
        ({"devices": "4", "epsilon": "0"}, Budget(devices=4, epsilon=0.0)),
        ({"memory": None, "percentile": "0.5"}, Budget(percentile=0.5)),
    ],
)
def test_limits_are_read_as_they_are_written(written: dict[str, Any], wanted: Budget) -> None:
    assert Budget.parse(**written) == wanted


@pytest.mark.parametrize("name", [one.name for one in fields(Budget)])
@pytest.mark.parametrize("value", ["nan", "inf", "-1", float("nan"), float("inf"), -1.0, "many", ""])
def test_no_limit_can_be_one_that_nothing_is_compared_with(name: str, value: str | float) -> None:
    """`nan` compares as false with everything: a limit of it would break always, or never."""
    with pytest.raises(Mistake):
        Budget.parse(**{name: value})
