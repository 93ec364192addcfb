from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.numerics.top_k import top_k_mask, top_k_places


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.integers(-3, 3), min_size=1, max_size=40), data=st.data())
def test_of_equals_the_first_are_taken(values: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(values)))
    expected = sorted(range(len(values)), key=lambda one: (-abs(values[one]), one))[:count]
    row = torch.tensor(values, dtype=torch.float32)
    assert top_k_mask(row, count).nonzero().flatten().tolist() == sorted(expected)
    places = top_k_places(row, count).tolist()
    assert places == sorted(set(places)) and sorted(abs(values[one]) for one in places) == sorted(
        abs(values[one]) for one in expected
    )


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite(bad: float) -> None:
    row = torch.tensor([1.0, 2.0, bad, 3.0])
    assert top_k_mask(row, 2).tolist() == [True, True, False, False], "the row is rejected anyway"
    assert top_k_places(row, 1).tolist() == [2], "it must be seen by who receives it"
