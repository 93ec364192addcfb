"""Second moments are known of what is computed, whatever class or function computes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoestring
from shoestring import Job
from shoestring.compression.calibration.scratch import Scratch
from shoestring.compression.calibration.weight_usage import record_usage, weights_of


class Turned(nn.Module):
    """x W + b, as GPT-2's Conv1D computes its layers."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(layer.weight.detach().T.contiguous()),
            nn.Parameter(layer.bias.detach().clone()),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


def layers(turned: bool) -> nn.Module:
    torch.manual_seed(0)
    found = [nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 4)]
    return nn.Sequential(*(one for layer in found for one in (Turned(layer) if turned else layer, nn.Tanh())))


def data(seed: int) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.logspace(-1, 1, 32)
    return [(torch.randn(16, 32, generator=generator) * scales, torch.zeros(16, dtype=torch.long)) for _ in range(8)]


def test_the_same_weights_the_other_way_round_get_the_same_bits_and_the_same_damage(tmp_path: Path) -> None:
    reports = [
        shoestring.compress(
            Job(
                model=lambda turned=turned: layers(turned),
                data=lambda: data(0),
                held_out=lambda: data(1),  # type: ignore[misc]
                loss=lambda output, batch: output.sum(),
            ),
            tmp_path / str(turned),
            use=["Quantize(bits=3)"],
            samples=64,
        ).report
        for turned in (False, True)
    ]
    bits = [[layer["bits"] for layer in one["layers"]] for one in reports]
    means = [1 - one["fidelity"]["mean"]["measured"] for one in reports]
    assert bits[0] == bits[1] and means[1] == pytest.approx(means[0], rel=0.02)


MODELS: dict[str, tuple[Any, Tensor]] = {
    "attention": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1),
        torch.randn(4, 5, 16),
    ),
    "lstm": (lambda: nn.LSTM(8, 12, 2, bidirectional=True, batch_first=True), torch.randn(4, 5, 8)),
    "gru": (lambda: nn.GRU(8, 12, batch_first=True), torch.randn(4, 5, 8)),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv1d(4, 6, 3, padding="same"), nn.ConvTranspose1d(6, 3, 3)),
        torch.randn(2, 4, 10),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_matrix_has_a_second_moment(name: str) -> None:
    make, x = MODELS[name]
    model = make().eval().requires_grad_(False)
    weights = weights_of(model)
    fused = torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad(), record_usage(model, weights, Scratch()) as usage:
        model(x)
    assert all(usage[one.name].moment is not None and usage[one.name].calls == 1 for one in weights if one.is_matrix)
    assert torch.backends.mha.get_fastpath_enabled() == fused


class Shared(nn.Module):
    """Two layers that read the same inputs, which are then changed in place; the second one reads others too if asked to."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.one, self.two, self.three, self.alone = nn.Linear(6, 3), nn.Linear(6, 4), nn.Linear(6, 2), alone

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        left = self.one(x).sum() + self.two(x).sum()
        x.mul_(3)
        if self.alone and float(x[0, 0]) > 0:
            left = left + self.two(x + 1).sum()
        return left + self.three(x).sum()


@pytest.mark.parametrize("alone", [False, True])
def test_weights_that_read_the_same_inputs_share_a_moment_and_others_have_their_own(alone: bool) -> None:
    model, scratch = Shared(alone).eval().requires_grad_(False), Scratch()
    batches = [torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)) * (-1) ** seed for seed in range(5)]
    assert len({float(one[0, 0]) > 0 for one in batches}) == 2, "some batches have the second reading, some have not"
    with torch.no_grad(), record_usage(model, weights_of(model), scratch) as usage:
        for batch in batches:
            model(batch)
    both = [3 * one + 1 for one in batches if alone and float(one[0, 0]) > 0]
    wanted = {"one": batches, "two": [*batches, *both], "three": [3 * one for one in batches]}
    for name, some in wanted.items():
        x, found = torch.cat(some), usage[f"{name}.weight"]
        assert found.inputs == len(x) and found.moment is not None
        assert torch.allclose(found.moment.dense(), x.T @ x, rtol=1e-4, atol=1e-3)
    assert (usage["one.weight"].moment is usage["two.weight"].moment) == (not alone)


@pytest.mark.parametrize("size", [8, 5])
def test_the_order_of_numbers_in_memory_does_not_matter(size: int) -> None:
    """Convolutions in channels_last, and weights that are a transposed tensor, once got no second moments."""
    torch.manual_seed(0)
    weight, x = torch.randn(8, size), torch.randn(7, size)
    for stored in (weight, weight.T.contiguous().T):
        layer = nn.Linear(size, 8)
        layer.weight = nn.Parameter(stored.detach())
        assert torch.allclose(moment_of(layer, x), x.T @ x, atol=1e-5)
    images = torch.randn(2, 4, size, size)
    plain = nn.Conv2d(4, 6, 3, padding=1)
    wanted = moment_of(plain, images)
    found = moment_of(plain.to(memory_format=torch.channels_last), images)  # type: ignore[call-overload]
    assert torch.allclose(found, wanted, atol=1e-4)


def moment_of(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad(), record_usage(layer, weights_of(layer), Scratch()) as usage:
        layer(x)
    moment = usage["weight"].moment
    assert moment is not None and not usage["weight"].inputs_first
    return moment.dense()


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("how", [{"padding": "valid"}, {"padding": "same"}, {"padding": [1], "stride": [2]}])
def test_a_convolution_s_moment_is_that_of_its_inputs_however_its_padding_is_written(
    dims: int, how: dict[str, Any]
) -> None:
    """One number stands for every dimension: torch passes padding="valid" on as [0]."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, *(7, 6)[:dims], generator=generator)
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.randn(4, 2, *(3, 3)[:dims], generator=generator))
    convolution = nn.functional.conv1d if dims == 1 else nn.functional.conv2d
    with torch.no_grad(), record_usage(layer, weights_of(layer), Scratch()) as usage:
        found = convolution(x, layer.weight, **how)
    moment, flat = usage["weight"].moment, layer.weight.detach().flatten(1)
    assert moment is not None and usage["weight"].inputs == found.numel() // 4
    torch.testing.assert_close((flat @ moment.dense() @ flat.T).trace(), found.square().sum())
