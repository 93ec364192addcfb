"""What is told where a size can't be kept: the least that there is, and a frontier that begins there."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import shoestring
from shoestring import Job
from shoestring.compression.begin import begin_session
from shoestring.compression.library import source_of
from shoestring.compression.room import CompressPlan
from shoestring.compression.session import CompressOptions
from shoestring.core.budget import Budget
from shoestring.core.errors import OverBudget
from shoestring.planning.plan import Plan
from tests.compression.models import batches, loss, vectors


def many_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(60) for layer in (nn.Linear(16, 16), nn.Tanh())), nn.Linear(16, 4))


JOB = Job(
    model=many_layers,
    data=lambda: batches(4, vectors(16)),
    held_out=lambda: batches(4, vectors(16), 1),
    loss=loss,
    forward=lambda model, batch: model(batch[0]),
)


def test_the_nearest_is_the_least_that_there_is_and_the_frontier_begins_with_it(tmp_path: Path) -> None:
    """Bytes of 120 weights, each rounded up to a unit, once made the least look like more than there was room for, and the plain model was
    named as the nearest."""
    with pytest.raises(OverBudget) as told:
        shoestring.compress(JOB, tmp_path / "small", size=1000, samples=16)
    plan = told.value.nearest
    assert isinstance(plan, Plan)
    least, points = int(plan.predicted["size_bytes"]), plan.as_json()["details"]["frontier"]
    assert points and min(point["size_bytes"] for point in points) == least
    small = shoestring.compress(JOB, tmp_path / "least", size=least, samples=16)
    assert small.report["size_bytes"]["measured"] <= least
    with pytest.raises(OverBudget):
        shoestring.compress(JOB, tmp_path / "less", size=least - 1, samples=16)


def test_the_nearest_that_is_named_works_when_it_is_given(tmp_path: Path) -> None:
    """9,761 bytes were once named as 9.53 KiB, which are 9,758, and fidelity 0.99996 as 100 %."""

    def refusal(**limits: str) -> str:
        with pytest.raises(OverBudget) as told:
            shoestring.compress(JOB, tmp_path / "refused", samples=16, **limits)  # type: ignore[arg-type]
        return str(told.value)

    size = found(r"least that works is ([\d.,]+ \wiB)", refusal(size="1kB"))
    assert shoestring.compress(JOB, tmp_path / "small", size=size, samples=16).report["missed"] in ([], ())
    both = refusal(size=size, keep="99.9999999 %")
    assert "nothing fits" in both and "99.9999999 %" in both
    keep, size = found(r"fidelity ([\d.]+ %)", both), found(r"least that works is ([\d.,]+ \wiB)", both)
    assert plan_within(size=size, keep=keep).numbers()["quality"] >= float(keep[:-2]) / 100


def found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None, text
    return match[1]


def plan_within(**limits: str) -> CompressPlan:
    budget = Budget.parse(size=limits["size"], quality=limits["keep"])
    return begin_session(source_of(JOB, None, {}), CompressOptions(budget, unseen=16)).plan


@pytest.mark.parametrize(
    "use",
    [
        None,
        ["Quantize(bits=4)"],
        ["Quantize()", "Half()"],
        ["Codebook()"],
        ["Int8()"],
        ["Sparsify()", "Quantize(bits=4)"],
        ["ProductQuantize(bits=4)"],
    ],
)
def test_weights_beyond_what_float16_holds_stay_as_they_are_and_are_named(
    use: list[str] | None, tmp_path: Path
) -> None:
    def huge() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.Linear(16, 4))
        with torch.no_grad():
            model[0].weight[3, 5] = 3e8
        return model

    job = Job(
        model=huge,
        data=lambda: batches(6, vectors(16)),
        held_out=lambda: batches(6, vectors(16), 1),
        loss=loss,
        forward=lambda model, batch: model(batch[0]),
    )
    small = shoestring.compress(job, tmp_path / "small", use=use, size=None if use else 6000, samples=16)
    stored = {layer["name"]: layer for layer in small.report["layers"]}
    assert (
        stored["0.weight"]["form"] in ("plain", "sparse")
        and not stored["0.weight"]["technique"]
        and stored["2.weight"]["bits"] < 32
    )
    assert any("0.weight" in note and "3e+08" in note for note in small.report["notes"])
    assert small.model[0].weight[3, 5] == 3e8


def test_a_size_that_such_a_weight_stands_in_the_way_of_is_refused_with_its_name(tmp_path: Path) -> None:
    def model() -> nn.Module:
        made = many_layers()
        with torch.no_grad():
            made[0].weight[3, 5] = 3e8  # type: ignore[index]
        return made

    with pytest.raises(OverBudget, match=r"0\.weight has numbers up to 3e\+08, .*: it is stored as it is"):
        shoestring.compress(replace(JOB, model=model), tmp_path / "small", size=1000, samples=16)
