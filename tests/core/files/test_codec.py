"""Frozen values to JSON and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoestring.core.files.codec import Unreadable, from_json, to_json


class Colour(Enum):
    RED = 1
    BLUE = 2


@dataclass(frozen=True)
class Inner:
    name: str
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Outer:
    kind: ClassVar[str] = "outer"
    inner: Inner
    pair: tuple[int, float]
    where: Path = Path(".")
    colour: Colour = Colour.RED
    more: Mapping[str, Inner] = field(default_factory=dict)
    maybe: float | None = None
    flag: bool = False
    losses: tuple[float, ...] = ()


@dataclass(frozen=True)
class Versioned:
    VERSION: ClassVar[int] = 2
    steps: int = 0


inners = st.builds(Inner, st.text(), st.lists(st.integers(), max_size=3).map(tuple))
outers = st.builds(
    Outer,
    inners,
    st.tuples(st.integers(), st.floats(allow_nan=False)),
    st.just(Path("a/b")),
    st.sampled_from(Colour),
    st.dictionaries(st.text(), inners, max_size=3),
    st.none() | st.floats(allow_nan=False),
    st.booleans(),
    st.lists(st.floats(allow_nan=False), max_size=3).map(tuple),
)


@given(outers)
def test_what_was_written_is_read(value: Outer) -> None:
    assert from_json(Outer, json.loads(json.dumps(to_json(value)))) == value


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"name": "x", "size": 3}, "Inner has 'size', which is unknown; it has name, sizes"),
        ({}, "Inner lacks 'name'"),
        ({"name": 3}, "Inner.name is 3, not str"),
        ({"name": "x", "sizes": [1, True]}, r"Inner.sizes\[1\] is True, not int"),
        ({"name": "x", "sizes": 1}, "Inner.sizes is 1, not list"),
        ([], r"Inner is \[\], not dict"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place(data: Any, said: str) -> None:
    with pytest.raises(Unreadable, match=said):
        from_json(Inner, data)


def test_a_reader_of_what_is_told_ignores_what_a_newer_writer_says() -> None:
    assert from_json(Inner, {"name": "x", "later": 1}, unknown="ignored") == Inner("x")


def test_a_version_is_written_and_a_newer_one_is_refused() -> None:
    assert to_json(Versioned(3)) == {"version": 2, "steps": 3} and from_json(
        Versioned, {"version": 1, "steps": 3}
    ) == Versioned(3)
    with pytest.raises(Unreadable, match="is of version 3, and this shoestring reads up to 2"):
        from_json(Versioned, {"version": 3})


def test_a_whole_number_may_stand_for_a_fraction_and_true_for_no_number() -> None:
    assert from_json(Outer, {"inner": {"name": ""}, "pair": [1, 2], "losses": [1, 2.5]}).losses == (1.0, 2.5)
    with pytest.raises(Unreadable):
        from_json(Outer, {"inner": {"name": ""}, "pair": [1, True]})


def test_long_lists_of_numbers_are_taken_at_once_and_still_looked_at() -> None:
    many = [0.5] * 100_000
    assert from_json(Outer, {"inner": {"name": ""}, "pair": [1, 2.0], "losses": many}).losses == tuple(many)
    with pytest.raises(Unreadable, match=r"losses\[100000\] is 'x'"):
        from_json(Outer, {"inner": {"name": ""}, "pair": [1, 2.0], "losses": [*many, "x"]})
