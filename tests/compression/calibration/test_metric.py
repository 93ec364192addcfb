"""Metrics are told with what they are a mean of, and decide on as many samples as there are for that."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shoestring
from shoestring import Job
from shoestring.compression.calibration.metric import (
    MetricValue,
    mean_with_interval,
    metric_after_change,
    metrics,
    parse_floor,
    wilson,
)
from shoestring.compression.loading.source import samples_of
from shoestring.core.errors import Mistake, OverBudget


def labelled(seed: int, count: int = 6, size: int = 50) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    xs = [torch.randn(size, 8, generator=generator) for _ in range(count)]
    return [(x, (x[:, 0] + 0.4 * torch.randn(size, generator=generator) > 0).long()) for x in xs]


def accuracy(output: Tensor, batch: Any) -> dict[str, Tensor]:
    return {"accuracy": (output.argmax(1) == batch[1]).float().mean()}


def f1(output: Tensor, batch: Any) -> dict[str, Tensor]:
    said = output.argmax(1)
    return {"f1": 2 * (said * batch[1]).sum() / (said.sum() + batch[1].sum()).clamp(min=1)}


def sure() -> nn.Module:
    """Says yes where the first number is above zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    with torch.no_grad():
        for one in model.parameters():
            one.mul_(0.1)
        model[0].weight[0], model[0].weight[1] = torch.eye(8)[0], -torch.eye(8)[0]
        model[2].weight[:, :2] = torch.tensor([[-3.0, 3.0], [3.0, -3.0]])
    return model


class Louder(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 5 * x


def job_of(**more: Any) -> Job:
    return Job(
        **{"model": sure, "data": lambda: labelled(0), "held_out": lambda: labelled(1), "metrics": accuracy, **more}
    )


def test_the_error_of_a_mean_over_samples_is_that_of_samples() -> None:
    """Of batch means it was once told beside a number of samples."""
    job, model = job_of(), sure()
    found = metrics(job, model, labelled(1))
    with torch.no_grad():
        each = torch.cat([functional.cross_entropy(model(x), y, reduction="none") for x, y in labelled(1)]).tolist()
    loss = found["loss"]
    assert (loss.count, loss.unit) == (300, "samples") and loss.value == pytest.approx(fmean(each), rel=1e-5)
    assert loss.standard_error == pytest.approx(stdev(each) / 300**0.5, rel=1e-5)
    assert found["accuracy"].interval == pytest.approx(wilson(found["accuracy"].value, 300))


def test_what_is_no_mean_over_samples_has_an_error_of_batches() -> None:
    found = metrics(job_of(metrics=f1), sure(), labelled(1))
    assert (found["f1"].count, found["f1"].unit) == (6, "batches") and found["f1"].interval is not None
    assert found["loss"].unit == "samples"
    alone = metrics(job_of(held_out=None, metrics=None, validate=lambda model: {"own": 0.5}), sure(), labelled(1))
    assert alone["own"] == MetricValue(0.5, 0), "the job tells no n"


def test_a_loss_that_the_model_brings_is_one_for_the_batch() -> None:
    class Bringing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = sure()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            said = self.body(x)
            return {"loss": functional.cross_entropy(said, labels), "logits": said}

    job = Job(model=Bringing, data=lambda: labelled(0), forward=lambda model, batch: model(*batch))
    found = metrics(job, Bringing(), labelled(1))
    assert (found["loss"].count, found["loss"].unit) == (6, "batches")


def test_intervals_hold_as_often_as_they_say() -> None:
    torch.manual_seed(0)
    for share, count in ((0.9, 60), (0.98, 200)):
        inside = [
            low <= share <= high
            for low, high in (
                mean_with_interval([(1.0, float(one)) for one in torch.rand(count) < share], "samples").interval
                or (0, 0)
                for _ in range(500)
            )
        ]
        assert 0.92 <= fmean(inside) <= 0.99
    normal = [
        low <= 0 <= high
        for low, high in (
            mean_with_interval([(1.0, float(one)) for one in torch.randn(5)], "batches").interval or (0, 0)
            for _ in range(500)
        )
    ]
    assert 0.92 <= fmean(normal) <= 0.98


def test_half_of_the_held_out_samples_decide_about_a_metric() -> None:
    """Once it was 64 of 300, whatever was to be decided."""
    given = samples_of(job_of(), by_metric=True)
    assert sum(len(x) for x, _ in given.deciding) == 150 == sum(len(x) for x, _ in given.unseen)
    assert len(samples_of(job_of()).deciding) == len(samples_of(job_of()).checked)


def test_a_change_is_measured_side_by_side() -> None:
    before, after = (
        [(1.0, float(number % 10 > 0)) for number in range(100)],
        [(1.0, float(number % 10 > 1)) for number in range(100)],
    )
    everywhere = mean_with_interval([(1.0, float(number % 20 > 0)) for number in range(1000)], "samples")
    found = metric_after_change(everywhere, mean_with_interval(before, "samples"), mean_with_interval(after, "samples"))
    assert found.value == pytest.approx(0.85) and found.standard_error == pytest.approx(0.0302, abs=1e-3)


def test_what_can_not_be_told_from_the_floor_is_told_as_such(tmp_path: Path) -> None:
    job = job_of()
    there = metrics(job, sure(), labelled(1))["accuracy"].value
    with pytest.raises(OverBudget, match=r"n = 150 samples.*too few samples to tell it from") as told:
        shoestring.compress(job, tmp_path / "a", metric=f"accuracy>={there + 0.01:.4f}", samples=300)
    assert f"the original: {there:.4g} (95%: " in str(told.value) and "n = 300 samples" in str(told.value)
    with pytest.raises(OverBudget) as told:
        shoestring.compress(job, tmp_path / "b", metric="accuracy>=0.999", samples=300)
    assert "too few" not in str(told.value)


def test_a_metric_that_decided_is_told_with_its_interval_and_what_was_predicted(tmp_path: Path) -> None:
    small = shoestring.compress(job_of(), tmp_path / "small", metric="accuracy>=0.8", samples=300)
    told = small.report["metric"]["accuracy"]
    assert told["n"] == 150 and told["of"] == "samples" and told["interval"][0] < told["measured"] < told["interval"][1]
    assert told["decided_by"] == "accuracy>=0.8" and told["measured"] >= 0.8 and not small.report["missed"]
    assert abs(told["predicted"] - told["measured"]) < 0.05


def test_a_metric_is_predicted_from_what_the_model_became(tmp_path: Path) -> None:
    def unsure() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2), Louder())

    small = shoestring.compress(job_of(model=unsure), tmp_path / "small", use=["Quantize(bits=2)"], samples=300)
    loss = small.report["metric"]["loss"]
    assert abs(loss["original"] - loss["measured"]) > 0.05, "else nothing is tried"
    assert abs(loss["predicted"] - loss["measured"]) < 3 * loss["predicted_standard_error"] < 0.5
    assert loss["predicted"] < loss["original"] - 0.05, "the original's own is no prediction"


def test_a_job_that_validates_by_itself_has_no_predicted_metric(tmp_path: Path) -> None:
    job = job_of(held_out=None, metrics=None, validate=lambda model: {"own": 0.5})
    small = shoestring.compress(job, tmp_path / "small", use=["Quantize(bits=3)"], samples=100)
    own = small.report["metric"]["own"]
    assert own["predicted"] is None and (own["measured"], own["n"]) == (0.5, 0)


def test_floors_know_both_sides() -> None:
    found = MetricValue(0.9, 100, "samples", 0.01, (0.88, 0.92))
    assert (
        parse_floor("a>=0.91").undecided_note(found)
        and parse_floor("a<=0.89").undecided_note(found)
        and not parse_floor("a>=0.8").undecided_note(found)
    )
    assert parse_floor("a>=0.895").keeps_surely(found, 0.4) and not parse_floor("a>=0.895").keeps_surely(found, 1)
    assert parse_floor("a<=0.905").keeps_surely(found, 0.4) and not parse_floor("a<=0.905").keeps_surely(found, 1)


@pytest.mark.parametrize("written", ["accuracy>=.", "accuracy>=1.2.3", "accuracy>=-", "accuracy>0.9", ">=0.9"])
def test_a_bound_that_is_no_number_is_refused(written: str) -> None:
    with pytest.raises(Mistake, match="give a metric of the job and its bound"):
        parse_floor(written)
