"""Axes and curves: marks that enclose what is drawn, and positions inside the drawing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoestring.show.page.drawings.drawing import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    Scale,
    along,
    bytes_unit,
    groups,
    limit,
    memory_marks,
    path_of,
    strip,
    ticks,
)

NUMBERS = st.floats(-1e12, 1e12).filter(lambda one: one == 0 or abs(one) > 1e-15)


@given(NUMBERS, st.floats(1e-15, 1e12))
def test_round_values_enclose_what_is_drawn(low: float, wide: float) -> None:
    if wide < 1e-9 * abs(low):
        return  # a curve as flat as rounding
    high = low + wide
    found = ticks(low, high)
    step = found[1] - found[0]
    assert 2 <= len(found) <= 7 and found == sorted(set(found)), "no two marks are one"
    assert found[0] <= low + 1e-6 * step and found[-1] >= high - 1e-6 * step
    assert found[0] > low - 1.001 * step and found[-1] < high + 1.001 * step, "little room is left"


@pytest.mark.parametrize("value", [0.0, 5e-324, 1e-15, 1e-9, 0.7, 3.0, 1e12, -4.0])
def test_a_flat_curve_has_marks_around_it(value: float) -> None:
    found = ticks(value, value)
    assert len(set(found)) == len(found) >= 2 and found[0] <= value <= found[-1]


@given(st.floats(1, 1e13), st.one_of(st.none(), st.floats(1, 1e13)))
def test_memory_is_marked_from_zero_in_multiples_of_its_unit(top: float, budget: float | None) -> None:
    found = memory_marks(top, budget)
    assert found[0] == 0 and found[-1] >= top * 0.999
    if budget is not None and found[-1] < 0.999 * budget:
        assert budget > 1.7 * top, "a budget near the figures is in the plot"
    assert found[1] / bytes_unit(found[-1]) >= 1e-3


@given(NUMBERS, st.floats(1e-6, 1e6), st.floats(0, 1))
def test_a_scale_maps_its_ends_to_the_ends_of_the_plot(low: float, wide: float, share: float) -> None:
    if low + wide == low or wide < 1e-6 * abs(low):
        return
    y = Scale(low, low + wide, BOTTOM, TOP)
    assert y(low) == pytest.approx(BOTTOM, abs=0.11) and y(low + wide) == pytest.approx(TOP, abs=0.11)
    assert TOP - 0.11 <= y(low + share * wide) <= BOTTOM + 0.11
    (left, above) = (float(one) for one in path_of([(low, low)], Scale(low, low + wide, LEFT, RIGHT), y).split(","))
    assert (left, above) == pytest.approx((LEFT, BOTTOM), abs=0.11), "a path is drawn where a mark is"


def test_a_scale_without_width_is_in_the_middle() -> None:
    assert Scale(3.0, 3.0, LEFT, RIGHT)(3.0) == Scale(3.0, 3.0, LEFT, RIGHT)(9.0) == (LEFT + RIGHT) / 2


@given(st.integers(0, 3000), st.integers(1, 300))
def test_groups_are_few_and_lose_nothing(count: int, most: int) -> None:
    found = groups(range(count), most)
    assert len(found) <= most and [one for group in found for one in group] == list(range(count))
    assert all(found) and (not found or len({len(group) for group in found[:-1]} | {len(found[0])}) == 1)


def test_the_budget_is_a_line_only_inside_the_plot() -> None:
    y = Scale(0, 2048, BOTTOM, TOP)
    found = limit(1024, y)
    assert found is not None and found.text == "budget 1.00 KiB" and found.at == (TOP + BOTTOM) / 2
    assert limit(None, y) is limit(4096, y) is None


def test_marks_at_the_ends_stay_inside() -> None:
    found = along([0, 5, 10], Scale(0, 10, LEFT, RIGHT), str)
    assert [(one.text, one.anchor) for one in found] == [("0", "start"), ("5", "middle"), ("10", "end")]


def test_a_span_that_ends_before_it_begins_has_no_width() -> None:
    found = strip("one", [(0.0, 0.25, "forward"), (0.5, 0.4, "backward")], mark=0.5)
    assert [(one.x, one.width) for one in found.spans] == [("0.0", "250.0"), ("500.0", "0.0")] and found.mark == "500.0"
