"""The least devices that a combination of two releases is about, beside all combinations with small factors."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.federated.tasks.privacy.overlap import Devices, least_remainder


def groups_of(places: list[int]) -> list[Devices]:
    """Device number n is in the group places[n]; 0: it is in none."""
    return [
        frozenset(bytes([device]) for device, place in enumerate(places) if place == group)
        for group in sorted(set(places) - {0})
    ]


def by_trying(one: list[Devices], other: list[Devices], bound: int) -> int:
    """The fewest devices that remain of any combination with the factors -1, 0, 1 and 2."""
    found = bound
    for factors in product((-1, 0, 1, 2), repeat=len(one) + len(other)):
        left: dict[bytes, int] = {}
        for factor, group in zip(factors, [*one, *other], strict=True):
            for device in group:
                left[device] = left.get(device, 0) + factor
        remain = sum(value != 0 for value in left.values())
        found = min(found, remain or bound)
    return found


@settings(max_examples=150, deadline=None)
@given(
    places=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=14), bound=st.integers(2, 8)
)
def test_no_combination_is_about_fewer(places: list[tuple[int, int]], bound: int) -> None:
    one, other = (groups_of(list(side)) for side in zip(*places, strict=True))
    assert least_remainder(one, other, bound) == by_trying(one, other, bound)


def test_hundreds_of_groups_are_compared() -> None:
    def tens(shift: int) -> list[Devices]:
        return [
            frozenset((shift + n).to_bytes(4, "big") for n in range(begin, begin + 10)) for begin in range(0, 1000, 10)
        ]

    assert least_remainder(tens(0), tens(0), 10) == 10
    assert least_remainder(tens(0), tens(3), 10) == 3 + 3
