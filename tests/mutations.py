"""JSON that says something else: one place of a document is anything at all. For files that are sealed as ours are, and that no run of
ours has written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

ODD = [
    0,
    -1,
    1 << 31,
    1 << 63,
    10**400,
    1e308,
    -0.0,
    float("inf"),
    float("nan"),
    True,
    None,
    "",
    "../x",
    "/etc/passwd",
    "float32",
    "\0",
    "\ud800",
    [],
    {},
    [[]] * 3,
    {"": {}},
]
SHORT = 12  # entries of a list that are all places
NUMBERS = st.one_of(
    st.integers(),
    st.integers(-(10**400), 10**400),
    st.floats(),
    st.sampled_from([0, -1, 1 << 63, 10**400, 1e308, -0.0]),
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=5)),
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(st.text(max_size=5), inside, max_size=4),
    max_leaves=6,
)


def changed(draw: Callable[..., Any], whole: Any) -> Any:
    """The same JSON with something else in one place, or more of it."""
    if not isinstance(whole, (dict, list)) or not whole or draw(st.integers(0, 3)) == 0:
        return draw(JSON)
    if isinstance(whole, list):
        place = draw(st.integers(0, len(whole) - 1))
        return [changed(draw, one) if number == place else one for number, one in enumerate(whole)]
    name = draw(st.sampled_from(sorted(whole)))
    if draw(st.integers(0, 5)) == 0:
        return {key: one for key, one in whole.items() if key != name} | {draw(st.text(max_size=4)): draw(JSON)}
    return whole | {name: changed(draw, whole[name])}


def places(whole: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something stands in a document, from the outside in; of long lists, the first and the last entry."""
    inside: Any = ()
    if isinstance(whole, dict):
        inside = whole.items()
    elif isinstance(whole, list) and whole:
        numbers = range(len(whole)) if len(whole) <= SHORT else (0, len(whole) - 1)
        inside = [(number, whole[number]) for number in numbers]
    return [path, *(one for key, value in inside for one in places(value, (*path, key)))]


def with_value(whole: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of a document with something else in one place."""
    if not path:
        return value
    key, *rest = path
    if isinstance(whole, dict):
        return whole | {key: with_value(whole[key], tuple(rest), value)}
    return [with_value(one, tuple(rest), value) if number == key else one for number, one in enumerate(whole)]


def without(whole: Any, path: tuple[Any, ...]) -> Any:
    """A copy of a document that lacks one place."""
    key, *rest = path
    if isinstance(whole, dict):
        return {
            name: without(one, tuple(rest)) if name == key and rest else one
            for name, one in whole.items()
            if name != key or rest
        }
    return [
        without(one, tuple(rest)) if number == key and rest else one
        for number, one in enumerate(whole)
        if number != key or rest
    ]


def variants(whole: Any, each: int = 7) -> list[Any]:
    """The document with every place left out, deeply nested, and some odd values in every place: always the same ones."""
    found: list[Any] = []
    deep: Any = []
    for _ in range(500):
        deep = [deep]
    for number, path in enumerate(places(whole)):
        found += [with_value(whole, path, ODD[(number * each + one) % len(ODD)]) for one in range(each)]
        found += [without(whole, path)] if path else []
    return [*found, with_value(whole, places(whole)[-1], deep)]
