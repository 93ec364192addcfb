"""Codes against their formulas, number by number, and within the error that is stated."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoestring.numerics.block_quantization import (
    affine_codes,
    affine_error,
    affine_ranges,
    affine_values,
    companded_codes,
    companded_values,
    grid_values,
    in_blocks,
    largest,
    per_number,
    symmetric_codes,
    symmetric_values,
    worst_affine_error,
)


@st.composite
def rows(draw: st.DrawFn) -> Tensor:
    count, seed = draw(st.integers(1, 70)), draw(st.integers(0, 2**20))
    chance = torch.Generator().manual_seed(seed)
    found = (2 * torch.rand(3, count, generator=chance) - 1) * draw(st.sampled_from([1e-20, 1e-3, 1.0, 1e4, 1e20]))
    return found * (torch.rand(3, count, generator=chance) < draw(st.sampled_from([0.0, 0.5, 1.0])))


@settings(max_examples=60, deadline=None)
@given(values=rows())
def test_symmetric_codes_are_the_nearest(values: Tensor) -> None:
    scales = largest(values)
    assert scales[:, 0].tolist() == [max(map(abs, row)) for row in values.tolist()]
    codes = symmetric_codes(values, scales).nan_to_num(0.0)
    off = (symmetric_values(codes, scales) - values).abs()
    assert codes.abs().max() <= 127 and bool((off <= scales / 254 * 1.0001).all())


@settings(max_examples=60, deadline=None)
@given(values=rows(), positive=st.booleans())
def test_companded_codes_are_finer_near_zero(values: Tensor, positive: bool) -> None:
    values = values.abs() if positive else values
    scales = largest(values)
    codes = companded_codes(values, scales, positive)
    back = companded_values(codes.clone(), scales, positive)
    assert bool((codes >= (0 if positive else -127)).all()) and bool((codes <= (255 if positive else 127)).all())
    if positive:
        assert bool((back >= values * (1 - 1e-5)).all())
    share = (values / scales.clamp_min(1e-38)).abs()
    step = 4 / 255 * (share**0.25 + 1 / 255) ** 3 if positive else (share.sqrt() + 0.5 / 127) / 127
    assert bool(((back - values).abs() <= step * scales * 1.001).all())


@settings(max_examples=60, deadline=None)
@given(values=rows(), bits=st.sampled_from([8, 4, 2, 1]), block=st.integers(2, 80))
def test_affine_codes_are_the_nearest_levels_of_their_block(values: Tensor, bits: int, block: int) -> None:
    low, step = affine_ranges(values, bits, block)
    codes = affine_codes(values, low, step, bits, block, 0.5)
    back = affine_values(codes, low, step, block)
    for row in range(3):
        for place in range(0, values.shape[1], block):
            own = values[row, place : place + block]
            width = (float(own.max()) - float(own.min())) / (2**bits - 1)
            room = 1e-5 * float(own.abs().max())
            assert int(codes.max()) < 2**bits
            assert float((back[row, place : place + block] - own).abs().max()) <= width / 2 + room


@settings(max_examples=30, deadline=None)
@given(values=rows(), bits=st.sampled_from([8, 4, 2, 1]), block=st.integers(2, 80))
def test_the_expected_error_is_the_mean_over_all_draws(values: Tensor, bits: int, block: int) -> None:
    """Every number is one of two neighbours, with chances 1 - f and f: their mean squared error by 200 evenly spaced u."""
    row = values[:1]
    norm = float(row.double().square().sum())
    low, step = affine_ranges(row, bits, block)
    off = [
        affine_values(affine_codes(row, low, step, bits, block, (n + 0.5) / 200), low, step, block).double()
        - row.double()
        for n in range(200)
    ]
    found = float(torch.stack(off).square().sum() / 200) / norm if norm else 0.0
    stated = affine_error(row[0], bits, block)
    worst = worst_affine_error(row.shape[1], bits, block)
    assert math.isclose(stated, found, rel_tol=0.05, abs_tol=0.02 * worst + 1e-9) and stated <= worst * 1.0001


@settings(max_examples=60, deadline=None)
@given(columns=st.integers(1, 40), block=st.integers(1, 50), seed=st.integers(0, 99))
def test_grid_values_are_scale_times_code_less_zero(columns: int, block: int, seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (2, columns), generator=chance).to(torch.uint8)
    groups = -(-columns // block)
    scales, zeros = torch.rand(2, groups, generator=chance), torch.randint(0, 16, (2, groups), generator=chance).float()
    found = grid_values(codes, scales, zeros, block)
    for row in range(2):
        for column in range(columns):
            expected = scales[row, column // block] * (float(codes[row, column]) - zeros[row, column // block])
            assert found[row, column] == expected


@settings(max_examples=40, deadline=None)
@given(columns=st.integers(1, 40), block=st.integers(1, 50))
def test_blocks_are_cut_and_filled(columns: int, block: int) -> None:
    row = torch.arange(1, columns + 1)[None]
    last, zeros = in_blocks(row, block).flatten(1), in_blocks(row, block, fill=0).flatten(1)
    assert torch.equal(last[:, :columns], row) and torch.equal(zeros[:, :columns], row)
    assert bool((last[:, columns:] == columns).all()) and not zeros[:, columns:].any()
    assert per_number(torch.arange(last.shape[1] // block)[None], block, columns)[0].tolist() == [
        one // block for one in range(columns)
    ]
