"""Sizes and times as people write them: what is written is read as the same number, to the digits that are written."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoestring.core.errors import Mistake
from shoestring.core.units import (
    STEPS,
    about,
    budget_bytes,
    bytes_text,
    limit_text,
    parse_bytes,
    parse_seconds,
    seconds_text,
)

SIZES = st.floats(1.0, 1e15)
TIMES = st.floats(1e-9, 1e6)


def read_seconds(text: str) -> float:
    """A time as it is shown: `3 min 20 s`, `1 h 5 min`, `12.3 ms`."""
    each = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
    return sum(float(number) * each[unit] for number, unit in re.findall(r"([0-9.e+-]+) (ms|s|min|h)", text))


@given(SIZES)
def test_a_size_is_shown_within_half_of_its_last_digit(size: float) -> None:
    shown = parse_bytes(bytes_text(size).replace(",", "").replace(" ", ""))
    assert abs(shown - size) <= max(0.006 * size, 1)


@given(SIZES)
def test_a_size_that_is_shown_as_a_limit_is_never_below_it(size: float) -> None:
    assert parse_bytes(bytes_text(size, up=True).replace(",", "").replace(" ", "")) + 1 > size


@given(TIMES)
def test_a_time_is_shown_in_plain_digits(seconds: float) -> None:
    text = seconds_text(seconds)
    assert "e" not in text.replace("e-", ""), "no person reads 1e+03 ms"
    assert abs(read_seconds(text) - seconds) <= max(0.006 * seconds, 30 * (seconds >= 3600), 0.5 * (seconds >= 100))


@given(TIMES)
def test_a_time_that_is_shown_as_a_limit_is_never_below_it(seconds: float) -> None:
    assert read_seconds(limit_text(seconds, "seconds")) >= seconds * (1 - 1e-9)


@given(st.floats(0.0, 1.0))
def test_a_share_that_is_shown_as_the_least_is_never_above_it(share: float) -> None:
    shown = float(limit_text(share, "share", least=True).removesuffix(" %")) / 100
    assert shown <= share * (1 + 1e-12) and share - shown <= 0.01 * share + 1e-15


@given(st.integers(1, 10**6), st.sampled_from(sorted(STEPS)), st.sampled_from(["", "B", "b"]), st.booleans())
def test_every_unit_is_read_in_any_case(number: int, unit: str, byte: str, lower: bool) -> None:
    written = f" {number} {unit.lower() if lower else unit}{byte} "
    assert parse_bytes(written) == number * STEPS[unit]


@pytest.mark.parametrize(
    "text", ["", "B", "600 Mi Bytes", "-5MiB", "1e9", "5IB", "nan", "inf", "1,000", "0", "0.0GB", "9" * 400]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(Mistake):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["", "5", "0s", "-5ms", "5 min", "1e3s", "nans", "9" * 400 + "h"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(Mistake):
        parse_seconds(text)


@pytest.mark.parametrize(("written", "hint"), [("600", "did you mean 600MiB"), ("5KiB", "give a size"), (7, "7MiB")])
def test_a_budget_without_its_unit_is_told_what_may_be_meant(written: str | int, hint: str) -> None:
    with pytest.raises(Mistake, match=hint):
        budget_bytes(written)


def test_an_estimate_is_told_from_a_second_to_days() -> None:
    shown = {0: "1 s", 0.2: "1 s", 59: "59 s", 89.5: "90 s", 90: "2 min", 3570: "1 h 0 min", 172_800: "2 days"}
    assert {seconds: about(seconds) for seconds in shown} == shown
