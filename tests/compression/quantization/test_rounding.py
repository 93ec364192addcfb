"""Rounding with the inputs in mind: against a ten-line reference, and never worse than to the nearest where it counts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoestring.compression.calibration.moments import DAMPING
from shoestring.compression.formats.grid import GridFormat
from shoestring.compression.quantization.rounding import GridSetting, fit_grid, round_to_grid


def dense(weight: Tensor, setting: GridSetting, moment: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    one = round_to_grid(weight, [setting], moment, mask)[0]
    return GridFormat.of(
        one.codes, one.scales, one.zeros, setting.bits, setting.group, tuple(weight.shape), weight.dtype
    ).dense()


def inputs(columns: int, seed: int = 0) -> Tensor:
    """Correlated ones, with a few large columns."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(400, columns, generator=generator) @ torch.randn(columns, columns, generator=generator)
    x[:, ::5] *= 4
    return x


def test_it_is_gptq() -> None:
    """Column by column, in the order of the largest inputs; what is off is made up for by the inverse of what is left of the moment."""
    weight, x, setting = torch.randn(6, 20, generator=torch.Generator().manual_seed(1)), inputs(20), GridSetting(3, 8)
    moment = x.T @ x
    scale, zero = fit_grid(weight, setting, moment.diagonal())
    wide = [one.float().repeat_interleave(8, 1)[:, :20] for one in (scale, zero)]
    left, found = weight.double().clone(), torch.zeros(6, 20, dtype=torch.float64)
    damped = moment.double() + DAMPING * moment.diagonal().mean().double() * torch.eye(20, dtype=torch.float64)
    order = torch.argsort(moment.diagonal(), descending=True).tolist()
    for place, column in enumerate(order):
        rest = order[place:]
        inverse = torch.linalg.inv(damped[rest][:, rest])
        step, point = (one[:, column].double() for one in wide)
        found[:, column] = (((left[:, column] / step).round() + point).clamp(0, 7) - point) * step
        error = (left[:, column] - found[:, column]) / inverse[0, 0]
        left[:, rest] -= error[:, None] * inverse[0]
    assert torch.allclose(dense(weight, setting, moment), found.float(), atol=1e-5)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_what_the_layer_computes_changes_less_than_to_the_nearest(bits: int) -> None:
    weight, x = torch.randn(32, 64, generator=torch.Generator().manual_seed(2)), inputs(64)
    setting = GridSetting(bits, 32)
    with_inputs, nearest = ((dense(weight, setting, moment) - weight) @ x.T for moment in (x.T @ x, None))
    assert with_inputs.norm() < 0.8 * nearest.norm()


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 70),
    st.integers(2, 8),
    st.sampled_from([1, 7, 16, 64]),
    st.sampled_from([1e-9, 1.0, 1e4]),
)
def test_every_number_is_within_its_grid(rows: int, columns: int, bits: int, group: int, size: float) -> None:
    weight = size * torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * columns))
    found = dense(weight, GridSetting(bits, group))
    step = round_to_grid(weight, [GridSetting(bits, group)])[0].scales.float().max()
    assert found.shape == weight.shape and bool(torch.isfinite(found).all())
    assert bool(((found - weight).abs() <= weight.abs().max() + step).all())


def test_constant_zero_and_huge_weights() -> None:
    assert torch.equal(dense(torch.zeros(3, 8), GridSetting(4, 8)), torch.zeros(3, 8))
    assert torch.allclose(dense(torch.full((2, 8), 0.5), GridSetting(4, 8)), torch.full((2, 8), 0.5), rtol=1e-3)
    with pytest.raises(ValueError, match="float16"):
        dense(torch.full((2, 8), 1e9), GridSetting(2, 8))


def test_what_was_cut_stays_cut() -> None:
    weight, x = torch.randn(8, 32, generator=torch.Generator().manual_seed(3)), inputs(32)
    mask = torch.rand(8, 32, generator=torch.Generator().manual_seed(4)) < 0.5
    for moment in (x.T @ x, None):
        assert bool((dense(weight * mask, GridSetting(4, 16), moment, mask)[~mask] == 0).all())


def test_several_grids_at_once_are_each_alone() -> None:
    weight, x = torch.randn(8, 32, generator=torch.Generator().manual_seed(5)), inputs(32)
    several = [GridSetting(8, 32), GridSetting(4, 16), GridSetting(2, 8)]
    for one, setting in zip(round_to_grid(weight, several, x.T @ x), several, strict=True):
        alone = round_to_grid(weight, [setting], x.T @ x)[0]
        assert torch.equal(one.codes, alone.codes) and torch.equal(one.scales, alone.scales)


def test_inputs_that_are_always_zero_do_no_harm() -> None:
    weight, x = torch.randn(4, 16, generator=torch.Generator().manual_seed(6)), inputs(16)
    x[:, 3] = 0
    assert bool(torch.isfinite(dense(weight, GridSetting(3, 16), x.T @ x)).all())
    assert bool(torch.isfinite(dense(weight, GridSetting(3, 16), torch.zeros(16, 16))).all())
