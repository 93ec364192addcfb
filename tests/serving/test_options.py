"""What is asked of a server is read into limits, or refused in the user's words."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoestring.core.budget import parsed_latency
from shoestring.core.errors import Mistake
from shoestring.serving.options import ServeOptions


def test_the_same_is_asked_by_a_flag_and_by_a_number() -> None:
    texts = ServeOptions(p99="50ms", memory="2KiB", throughput="30", size="1KB", keep="99%")
    numbers = ServeOptions(p99=0.05, memory=2048, throughput=30.0, size=1000, keep=0.99)
    assert texts.budget() == numbers.budget()
    assert texts.as_asked() == numbers.as_asked() == {
        "latency": 0.05,
        "memory": 2048,
        "throughput": 30.0,
        "size": 1000,
        "quality": 0.99,
        "percentile": 0.99,
        "newest": False,
    }  # fmt: skip


def test_what_is_not_asked_for_is_kept_as_that() -> None:
    """A run that goes on compares it: to leave a limit out is to ask for something else."""
    asked = ServeOptions().as_asked()
    assert asked["latency"] is False and asked["memory"] is False and asked["percentile"] == 0.99
    assert ServeOptions(latency="20ms@50%").as_asked() != ServeOptions(latency="20ms@51%").as_asked()


@given(st.integers(1, 999), st.sampled_from(["us", "ms", "s"]), st.integers(1, 999))
def test_a_percentile_is_a_share_or_percents(time: int, unit: str, thousandth: int) -> None:
    share = thousandth / 1000
    for written in (f"{time}{unit}@{share}", f" {time}{unit} @ {thousandth / 10}% "):
        found, at = parsed_latency(written)
        assert found == f"{time}{unit}" and at == pytest.approx(share, rel=1e-12)
        assert ServeOptions(latency=written).budget().percentile == at


@pytest.mark.parametrize(
    "latency", ["20ms", "20ms@", "@50%", "20ms@0", "20ms@100%", "20ms@1", "20ms@1.2.3", "20ms@.", "20@50%", "", "0s@5%"]
)
def test_a_latency_that_says_less_or_more_is_refused(latency: str) -> None:
    with pytest.raises(Mistake):
        ServeOptions(latency=latency).budget()


@pytest.mark.parametrize(
    "asked",
    [
        {"p99": -0.5},
        {"p99": 0.0},
        {"p99": float("nan")},
        {"p99": float("inf")},
        {"throughput": "nan"},
        {"throughput": "inf"},
        {"keep": "nan"},
        {"keep": "101%"},
        {"keep": -0.1},
        {"memory": float("nan")},
        {"memory": float("inf")},
        {"memory": "9" * 400},
        {"memory": 0},
        {"p99": "9" * 400 + "s"},
        {"p99": "5ms", "latency": "5ms@50%"},
    ],
)
def test_a_limit_that_is_no_limit_is_refused(asked: dict[str, Any]) -> None:
    """Not one of them may come out as a server that keeps everything, or as an error of Python's."""
    with pytest.raises(Mistake):
        ServeOptions(**asked).budget()


@pytest.mark.parametrize("price", ["nan", "inf", "-1", "cheap", float("nan"), 1e9])
def test_a_price_that_is_none_is_refused(price: Any) -> None:
    assert ServeOptions(price="0.40").hourly_price == 0.4 and ServeOptions().hourly_price is None
    with pytest.raises(Mistake, match="--price"):
        _ = ServeOptions(price=price).hourly_price
