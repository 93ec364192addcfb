"""Second moments and their factors, panel by panel in a file, against the same in one matrix."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shoestring.compression.calibration.calibration import Calibration
from shoestring.compression.calibration.fidelity import OutputMeasure
from shoestring.compression.calibration.moments import DAMPING, SecondMoment
from shoestring.compression.calibration.scratch import Scratch
from shoestring.compression.calibration.weight_usage import sample_patches
from shoestring.compression.techniques.quantize import USUAL


def inputs(count: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(columns)
    return (
        torch.randn(count, columns, generator=generator)
        @ torch.randn(columns, columns, generator=generator)
        / columns**0.5
    )


@pytest.mark.parametrize("columns", [5, 256, 600])
def test_a_moment_in_panels_is_the_whole_one(columns: int) -> None:
    moment, x = SecondMoment.zero(columns, Scratch()), inputs(900, columns)
    for rows in x.split(300):
        moment.add(rows)
    whole, off = x.T @ x, inputs(7, columns)
    assert torch.allclose(moment.dense(), whole, rtol=1e-4, atol=1e-2)
    assert torch.allclose(moment.diagonal(), whole.diagonal(), rtol=1e-4)
    assert moment.error(off) == pytest.approx(float(((off @ whole) * off).sum()), rel=1e-4)
    assert torch.equal(SecondMoment.of(moment.dense()).dense(), moment.dense())


def test_a_factor_in_panels_is_the_cholesky_factor_and_is_made_once() -> None:
    x = inputs(200, 600)  # of rank 200
    moment = SecondMoment.of(x.T @ x)
    factor = moment.factor()
    assert factor is not None and moment.factor() is factor
    damped = (x.T @ x).double() + factor.damping * torch.eye(600)
    wanted = torch.linalg.cholesky(damped[factor.order][:, factor.order])
    found = torch.zeros(600, 600, dtype=torch.float64)
    for number, begin in enumerate(range(0, 600, 256)):
        panel = factor.unit_panel(number)
        found[begin : begin + len(panel), : panel.shape[1]] = panel * factor.diagonal[: panel.shape[1]]
    assert factor.damping == pytest.approx(DAMPING * float((x.T @ x).diagonal().mean()))
    assert torch.allclose(found, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))


def test_a_moment_that_is_not_a_number_has_no_factor() -> None:
    assert SecondMoment.of(torch.full((3, 3), float("nan"))).factor() is None


def test_what_was_tried_of_weights_does_not_stay_in_memory() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 16))
    batches = [torch.randn(16, 64) for _ in range(2)]
    study = Calibration(
        model, lambda model, batch: model(batch), batches[:1], batches[1:], (OutputMeasure("output", "cosine"),)
    )
    labels = [
        (weight.name, label) for weight in study.weights if weight.is_matrix for label in study.grids(weight, USUAL)
    ]
    assert labels and all(study.ways[key].parts is None for key in labels), "a form is made when it is asked for"
    first, again = (study.ways[labels[0]].form for _ in range(2))
    assert all(study.ways[key].form is not study.ways[key].form for key in labels)
    assert all(study.ways[key].parts is not None for key in labels)
    assert first is not again and torch.equal(first.dense(), again.dense())


def test_patches_of_many_pictures_are_every_nth_of_all() -> None:
    image = torch.randn(40, 3, 30, 30)
    whole = nn.functional.unfold(image, 3).transpose(1, 2).reshape(-1, 27)
    step = -(-len(whole) // 4096)
    assert torch.equal(sample_patches(image, lambda some: nn.functional.unfold(some, 3)), whole[::step])
