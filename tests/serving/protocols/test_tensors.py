"""Numbers of requests: what a datatype can hold becomes exactly that, everything else is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoestring.serving.protocols.http.refusals import RefusedRequest
from shoestring.serving.protocols.tensors import DATATYPES, from_bytes, from_lists, raw_bytes

NUMBERS = st.one_of(
    st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.none(), st.text(max_size=2)
)


@given(st.lists(NUMBERS, min_size=1, max_size=4), st.sampled_from(sorted(DATATYPES)))
def test_a_list_is_taken_exactly_or_refused(data: list[Any], dtype: str) -> None:
    try:
        found = from_lists(data, dtype, [len(data)], "data")
    except RefusedRequest as refused:
        assert refused.status == 400 and refused.field == "data"
        return
    kind = getattr(torch, dtype)
    assert found.dtype == kind
    if kind.is_floating_point:
        assert torch.equal(found, torch.tensor([float(one) for one in data], dtype=torch.float64).to(kind))
    else:
        assert [int(one) for one in found.tolist()] == [int(one) for one in data]


@given(st.binary(min_size=1, max_size=64), st.sampled_from(sorted(DATATYPES)))
def test_bytes_are_taken_as_they_are_or_refused(data: bytes, dtype: str) -> None:
    size = getattr(torch, dtype).itemsize
    try:
        found = from_bytes(bytearray(data), dtype, [max(len(data) // size, 1)], "x")
    except RefusedRequest as refused:
        assert refused.status == 400
        return
    assert raw_bytes(found) == data


@pytest.mark.parametrize(
    ("data", "dtype", "said"),
    [
        ([1.5], "int64", "INT64 needs whole numbers"),
        ([True], "int64", "needs whole numbers"),
        ([1], "bool", "needs true and false"),
        ([256], "uint8", "UINT8 holds numbers from 0 to 255"),
        ([-1], "uint64", "UINT64 holds"),
        ([70_000.0], "float16", "that its datatype can't hold"),
        ([[1], [2, 3]], "int64", "different lengths"),
    ],
)
def test_what_a_datatype_can_not_hold_is_told(data: list[Any], dtype: str, said: str) -> None:
    with pytest.raises(RefusedRequest, match=said):
        from_lists(data, dtype, [len(data)], "data")
