"""How far a measurement is off, in numbers and in words that say the same."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoestring.core.figures import AS, CLOSE, Figure, Figures, Quantity, figures

BYTES, SECONDS = Quantity("peak_bytes", "tensors", counted=True), Quantity("step_seconds", "a step", "seconds")
VALUES = st.floats(1e-6, 1e12)


@given(VALUES, VALUES, st.sampled_from((BYTES, SECONDS)))
def test_the_words_say_what_the_number_says(predicted: float, measured: float, quantity: Quantity) -> None:
    one = Figure(quantity, predicted, measured)
    assert one.off is not None and one.off == pytest.approx(measured / predicted - 1, abs=1e-11)
    if one.off_text == AS:
        assert abs(one.off) < CLOSE
        return
    assert one.off_text.endswith("above") == (measured > predicted)
    found = re.fullmatch(r"([0-9,.]+) (%|bytes) (above|below)", one.off_text)
    assert found is not None, one.off_text
    told = float(found[1].replace(",", ""))
    if found[2] == "%":
        assert abs(told - 100 * abs(one.off)) <= (0.51 if told >= 9.95 else 0.051)
    else:
        assert abs(told - abs(measured - predicted)) < 1 and abs(one.off) < CLOSE


@pytest.mark.parametrize(
    ("predicted", "measured", "off", "text"),
    [
        (None, 3.0, None, ""),
        (3.0, None, None, ""),
        (0.0, 3.0, None, ""),  # nothing was predicted: there is no share of it
        (0.0, 0.0, 0.0, AS),
        (4.0, 0.0, -1.0, "100 % below"),
        (1.0, 1.0994, 0.0994, "9.9 % above"),
        (1.0, 1.0996, 0.0996, "10 % above"),
        (1.0, 21.0, 20.0, "2,000 % above"),
        (10_000.0, 10_001.0, 1e-4, AS),
    ],
)
def test_what_is_not_known_is_not_compared(
    predicted: float | None, measured: float | None, off: float | None, text: str
) -> None:
    one = Figure(SECONDS, predicted, measured)
    assert one.off == off and one.off_text == text


def test_a_figure_that_may_be_left_out_is_shown_where_it_is_not_zero() -> None:
    optional = Quantity("moved", "moved", optional=True)
    shown = {pair: Figure(optional, *pair).shown for pair in ((None, None), (0.0, 0.0), (1.0, 0.0), (1.0, 2.0))}
    assert shown == {(None, None): False, (0.0, 0.0): False, (1.0, 0.0): False, (1.0, 2.0): True}
    assert Figure(BYTES, 0.0, 0.0).shown


def test_measuring_changes_only_what_was_measured_and_keeps_the_order() -> None:
    found = figures((SECONDS, BYTES), {"peak_bytes": 5.0, "other": 1.0}, basis="rehearsed")
    assert [one.quantity.name for one in found] == ["step_seconds", "peak_bytes"]
    assert found.predictions == {"step_seconds": None, "peak_bytes": 5.0} and "other" not in found
    after = found.with_measured({"peak_bytes": 6.0}).with_measured({"step_seconds": 0.5, "other": 2.0})
    assert (after["peak_bytes"].measured, after["step_seconds"].measured) == (6.0, 0.5)
    assert after.predictions == found.predictions and after["peak_bytes"].basis == "rehearsed"
    assert after.with_measured({"peak_bytes": None})["peak_bytes"].measured is None, "also that it is not known"
    assert list(Figures()) == []
