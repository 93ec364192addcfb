"""Where positions are when packed, and what is left of masks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shoestring.serving.engines.attention import ATTENTION, PackedAttention, PackedRows, Unpackable

LENGTHS = st.lists(st.integers(1, 9), min_size=2, max_size=5).map(sorted)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@given(LENGTHS)
def test_unpacking_puts_every_position_back(lengths: list[int]) -> None:
    rows = PackedRows(lengths)
    padded = drawn(len(lengths), max(lengths), 2)
    packed = rows.pack(padded)
    assert torch.equal(packed[0], torch.cat([padded[row, :length] for row, length in enumerate(lengths)]))
    there = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    assert torch.equal(rows.unpack(packed), padded * there[..., None])
    assert torch.equal(rows.pack(padded[:1])[0], torch.cat([padded[0, :length] for length in lengths]))


@given(
    LENGTHS, st.sampled_from(["none", "padded", "shared", "by key", "packed"]), st.booleans(), st.sampled_from([1, 2])
)
def test_each_sample_attends_to_itself(lengths: list[int], kind: str, adds: bool, groups: int) -> None:
    """With every form of mask: (n, 1, L, L), (L, L), (n, 1, 1, L), and (1, 1, 1, total) that a block made."""
    rows, longest = PackedRows(lengths), max(lengths)
    count, total = rows.count, rows.total
    query, key, value = (drawn(1, heads, total, 4) for heads in (4, 4 // groups, 4 // groups))
    sizes = {
        "padded": (count, 1, longest, longest),
        "shared": (longest, longest),
        "by key": (count, 1, 1, longest),
        "packed": (1, 1, 1, total),
    }
    mask = None
    if kind in sizes:
        hidden = drawn(*sizes[kind]) > 0.5
        hidden[..., 0] = False
        mask = torch.zeros(sizes[kind]).masked_fill(hidden, -5.0) if adds else ~hidden
    if kind == "packed" and total == longest:
        return
    if kind == "packed" and mask is not None and not adds:
        mask = mask | True  # a sample of which all is hidden has no answer
    causal = kind == "none"
    found = PackedAttention(rows).attend(query, key, value, mask, 0.0, causal, enable_gqa=groups > 1)
    start = 0
    for row, length in enumerate(lengths):
        part = slice(start, start + length)
        own = None if mask is None else mask[..., part] if kind == "packed" else mask
        if own is not None and kind != "packed":
            own = own[(None,) * (4 - own.ndim)]
            own = own[row if len(own) > 1 else 0, :, :length, :length]
        alone = ATTENTION(
            *(one[:, :, part] for one in (query, key, value)), attn_mask=own, is_causal=causal, enable_gqa=groups > 1
        )
        assert torch.allclose(found[:, :, part], alone, atol=1e-5)
        start += length


@pytest.mark.parametrize(
    ("query", "key", "mask", "told"),
    [
        ((1, 2, 5, 4), (1, 2, 5, 4), (1, 2, 5, 5), "its mask depends on all positions of a batch"),
        ((1, 2, 3, 4), (1, 2, 3, 4), None, "its attention is not over the positions of its blocks"),
        ((1, 2, 5, 4), (1, 2, 3, 4), None, "its attention is not over the positions of its blocks"),
    ],
)
def test_other_attention_is_refused(
    query: tuple[int, ...], key: tuple[int, ...], mask: tuple[int, ...] | None, told: str
) -> None:
    attention = PackedAttention(PackedRows([2, 3]))
    with pytest.raises(Unpackable, match=told):
        attention.attend(drawn(*query), drawn(*key), drawn(*key), None if mask is None else drawn(*mask))
