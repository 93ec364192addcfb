"""Bit streams against whole numbers of Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.numerics import bit_packing
from shoestring.numerics.bit_packing import pack_bits, packed_bytes, unpack_bits


@settings(max_examples=100, deadline=None)
@given(bits=st.integers(1, 8), numbers=st.lists(st.integers(0, 255), max_size=70))
def test_a_stream_is_the_numbers_as_one_large_number(bits: int, numbers: list[int]) -> None:
    codes = [one % 2**bits for one in numbers]
    stream = pack_bits(torch.tensor(codes, dtype=torch.uint8), bits)
    whole = sum(code << (bits * place) for place, code in enumerate(codes))
    assert bytes(stream.tolist()) == whole.to_bytes(packed_bytes(len(codes), bits), "little")
    assert unpack_bits(stream, bits, len(codes)).tolist() == codes


@settings(max_examples=60, deadline=None)
@given(bits=st.sampled_from([8, 4, 2, 1]), count=st.integers(1, 50), seed=st.integers(0, 99))
def test_rows_end_with_a_byte(bits: int, count: int, seed: int) -> None:
    codes = torch.randint(0, 2**bits, (3, count), generator=torch.Generator().manual_seed(seed))
    rows = pack_bits(codes, bits, multiple=8 // bits)
    assert rows.shape == (3, -(-count * bits // 8)) == (3, packed_bytes(count, bits, multiple=8 // bits))
    assert torch.equal(unpack_bits(rows, bits, count), codes.to(torch.uint8))
    for row, code in zip(rows, codes, strict=True):
        assert torch.equal(pack_bits(code, bits)[: len(row)], row), "the same bytes, without those that are zeros"


@pytest.mark.parametrize("bits", range(1, 9))
def test_long_streams_are_those_of_their_pieces(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = torch.randint(0, 2**bits, (1001,), generator=torch.Generator().manual_seed(bits))
    whole = pack_bits(codes, bits)
    monkeypatch.setattr(bit_packing, "PIECE", 64)
    assert torch.equal(pack_bits(codes, bits), whole) and unpack_bits(whole, bits, 1001).tolist() == codes.tolist()


def test_numbers_that_end_within_a_byte_are_refused() -> None:
    with pytest.raises(AssertionError, match="within a byte"):
        pack_bits(torch.zeros(3), 3, multiple=2)
