"""Products of bytes: the same numbers on every processor, and what is not finite stays so."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shoestring
from shoestring import Job
from shoestring.compression.begin import begin_session
from shoestring.compression.calibration.latency import Latency, LatencyTimer
from shoestring.compression.formats import int8
from shoestring.compression.formats.int8 import Int8Format
from shoestring.compression.formats.packed_modules import formats_of, place_formats, temporary_formats
from shoestring.compression.loading.source import ModelSource, prepare_model
from shoestring.compression.onnx.export import export_onnx
from shoestring.compression.quantization.rounding import GridSetting, round_to_grid
from shoestring.compression.session import CompressOptions
from shoestring.core.budget import Budget
from shoestring.core.errors import Mistake, OverBudget
from shoestring.measure.instructions import VARIABLE
from tests.compression.models import batches, called, job_of, loss, words


def form_of(weight: Tensor, largest: float | None = None) -> Int8Format:
    one = round_to_grid(weight, [GridSetting(8, weight.shape[1])])[0]
    return Int8Format.of(one.codes, one.scales, one.zeros, largest)


@pytest.mark.parametrize("largest", [None, 4.0])
@pytest.mark.parametrize("shape", [(7, 33), (0, 33), (2, 3, 33), (33,)])
def test_it_is_close_to_the_product_and_to_the_bit_the_same_without_the_fast_one(
    shape: tuple[int, ...], largest: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(20, 33), torch.randn(20), torch.randn(shape).clamp(-4, 4)
    form = form_of(weight, largest)
    assert float((form.dense() - weight).abs().max()) < 0.02 and torch.equal(
        form.rows(torch.tensor([3, 1])), form.dense()[[3, 1]]
    )
    found = form.linear(x, bias)
    assert found.shape == (*shape[:-1], 20)
    torch.testing.assert_close(found, nn.functional.linear(x, weight, bias), atol=0.25, rtol=0.02)
    monkeypatch.setattr(int8, "deadly", lambda dtype: "it would die")
    monkeypatch.setattr(int8, "int8_product", None)
    assert torch.equal(form.linear(x, bias), found), "whole numbers are exact, whoever multiplies them"


SATURATED = """
import torch
from shoestring.compression.formats.int8 import int8_matmul, sums_are_exact
left, right = (torch.full((5, 33), byte, dtype=torch.int8) for byte in (127, -128))
for one, other in ((left, left), (left, right), (right, right)):
    assert torch.equal(int8_matmul(one, other), (one.double() @ other.double().t()).int()), (one[0, 0], other[0, 0])
print(sums_are_exact())
"""


def test_a_processor_whose_product_of_bytes_saturates_gives_the_same_numbers() -> None:
    """oneDNN without VNNI, as on older processors: what it would cut off is added up otherwise."""
    done = subprocess.run(
        [sys.executable, "-c", SATURATED], env=os.environ | {VARIABLE: "AVX2"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    if platform.machine() == "x86_64":
        assert done.stdout == "False\n", "oneDNN's own product is wrong here: it is not used"


@pytest.mark.parametrize("largest", [None, 2.0])
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_does_not_become_finite(odd: float, largest: float | None) -> None:
    x = torch.ones(3, 16)
    x[1, 4] = odd
    found = form_of(torch.randn(4, 16), largest).linear(x, None)
    assert not bool(torch.isfinite(found[1]).any()) and bool(torch.isfinite(found[[0, 2]]).all())


def test_zeros_give_the_bias_and_gradients_go_past_the_rounding() -> None:
    form, bias = form_of(torch.randn(4, 16)), torch.randn(4)
    assert torch.equal(form.linear(torch.zeros(2, 16), bias), bias.expand(2, 4))
    x = torch.randn(2, 16, requires_grad=True)
    found = form.linear(x, bias)
    torch.testing.assert_close(found, form.linear(x.detach(), bias))
    found.sum().backward()
    torch.testing.assert_close(x.grad, form.dense().sum(0).expand(2, 16))


def test_inputs_above_the_calibrated_scale_are_cut_to_it() -> None:
    form = form_of(torch.eye(16), 1.0)
    assert form.linear(torch.full((1, 16), 5.0), None).tolist() == [[pytest.approx(1.0, rel=0.01)] * 16]


def test_a_model_is_as_it_was_after_a_try() -> None:
    model = job_of("mlp").model()
    before, x = [(name, id(one)) for name, one in model.named_parameters()], torch.randn(3, 16)
    wanted = model(x)
    with temporary_formats(model, {"0.weight": form_of(model.get_parameter("0.weight").detach())}):
        assert not torch.equal(model(x), wanted) and list(formats_of(model)) == ["0.weight"]
    assert [(name, id(one)) for name, one in model.named_parameters()] == before and torch.equal(model(x), wanted)
    assert type(model.get_submodule("0")) is nn.Linear


@pytest.mark.parametrize("inputs", ["token", "calibrated"])
def test_damage_counts_the_rounded_inputs_and_other_layers_are_left_alone(inputs: str, tmp_path: Path) -> None:
    small = shoestring.compress(job_of("bert"), tmp_path / "small", use=[f"Int8(inputs={inputs!r})"], samples=64)
    told = small.report
    kinds = {one["name"]: one["form"] for one in told["layers"]}
    assert {kind for name, kind in kinds.items() if "dense.weight" in name or "query.weight" in name} == {"int8"}
    assert kinds["embeddings.word_embeddings.weight"] == "plain"
    damage = {key: 1 - told["fidelity"]["mean"][key] for key in ("predicted", "measured")}
    assert 0 < damage["measured"] < 0.01 and 0.4 < damage["measured"] / damage["predicted"] < 2.5
    file = export_onnx(small.model, called, batches(1, words)[0], tmp_path / "model.onnx")
    assert file.largest_difference < file.tolerance and "does not round the inputs" in file.notes[0]


def test_a_model_without_linear_layers_and_a_processor_that_dies_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(
        model=lambda: nn.Conv1d(4, 4, 3),
        data=lambda: [(torch.randn(2, 4, 9),) for _ in range(6)],
        forward=called,
        loss=loss,
    )
    with pytest.raises(Mistake, match="no plain linear layer"):
        shoestring.compress(job, tmp_path / "a", use=["Int8()"], samples=4)
    monkeypatch.setattr(
        "shoestring.compression.techniques.int8.deadly", lambda dtype: "int8 products do not work on this machine"
    )
    with pytest.raises(Mistake, match="do not work on this machine"):
        shoestring.compress(job_of("mlp"), tmp_path / "b", use=["Int8()"], samples=4)


def test_a_latency_below_the_originals_is_kept_by_products_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LatencyTimer, "decoding", lambda self, stored: -0.001 if stored.kind == "int8" else 0.001)
    monkeypatch.setattr("shoestring.compression.calibration.latency.latency", lambda *given: Latency(0.010, 0.010, 20))
    monkeypatch.setattr(
        "shoestring.compression.room.latencies",
        lambda models, *given: [
            Latency(0.010 - 0.001 * sum(form.kind == "int8" for form in formats_of(model).values()), 0.010, 20)
            for model in models
        ],
    )
    job = job_of("mlp")
    source = ModelSource(job, prepare_model(job.model()), {"job": None, "edits": [], "decoded": 0}, (), "mlp")
    plan = begin_session(source, CompressOptions(Budget.parse(latency="8.5ms"), unseen=16)).plan
    assert "Int8()" in str(plan) and plan.predicted["latency_seconds"] <= 0.0085
    assert {one["form"] for one in plan.details.layers()} >= {"int8", "plain"}, "no more layers than it takes"
    plan = begin_session(source, CompressOptions(Budget.parse(latency="10.5ms", size="5KB"), unseen=16)).plan
    assert plan.predicted["latency_seconds"] <= 0.0105 and plan.predicted["size_bytes"] <= 5000


def test_an_answer_that_is_later_than_reckoned_is_reckoned_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every packed weight is said to take nothing, and the whole to take 2 ms more: then only decoding once keeps the latency."""
    monkeypatch.setattr(LatencyTimer, "decoding", lambda self, stored: 0.0)
    monkeypatch.setattr("shoestring.compression.calibration.latency.latency", lambda *given: Latency(0.010, 0.010, 20))
    monkeypatch.setattr(
        "shoestring.compression.room.latencies",
        lambda models, *given: [Latency(0.012 if formats_of(model) else 0.010, 0.012, 20) for model in models],
    )
    job = job_of("mlp")
    source = ModelSource(job, prepare_model(job.model()), {"job": None, "edits": [], "decoded": 0}, (), "mlp")
    plan = begin_session(source, CompressOptions(Budget.parse(latency="11ms", size="5KB"), unseen=16)).plan
    assert "Decode()" in str(plan) and plan.predicted["latency_seconds"] == pytest.approx(0.010)


def test_a_latency_that_is_refused_on_a_busy_machine_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "shoestring.compression.calibration.latency.latency", lambda *given: Latency(0.010, 0.010, 4, busy=0.9)
    )
    job = job_of("mlp")
    source = ModelSource(job, prepare_model(job.model()), {"job": None, "edits": [], "decoded": 0}, (), "mlp")
    with pytest.raises(OverBudget, match=r"machine was busy.*ask again when it is quieter"):
        begin_session(source, CompressOptions(Budget.parse(latency="1us"), unseen=16))


def test_a_form_that_says_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match="int8"):
        Int8Format((2, 3, 4), torch.float32, {"inputs": "token"}, {})
    model = place_formats(nn.Sequential(nn.Linear(16, 4)), {"0.weight": form_of(torch.randn(4, 16))})
    assert model(torch.ones(1, 16)).shape == (1, 4)
