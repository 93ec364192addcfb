"""A small and a large model in one folder: the small one's job is named by the caller, here and when the folder is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shoestring
from shoestring import Mistake
from shoestring.compression.exits import CascadeModel
from shoestring.compression.techniques.cascade import Cascade
from tests.compression.techniques.test_early_exit import FILE
from tests.machine import CountedWork


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    large, small = tmp_path / "large.py", tmp_path / "small.py"
    large.write_text(FILE)
    small.write_text(FILE.replace("range(6)", "range(1)"))
    return large, small


def test_what_the_small_model_is_sure_of_it_answers(
    files: tuple[Path, Path], tmp_path: Path, work: CountedWork
) -> None:
    large, small = files
    made = shoestring.compress(large, tmp_path / "both", use=[f"Cascade(small={str(small)!r})"], keep=0.7, samples=256)
    assert isinstance(made.model, CascadeModel) and not made.report["missed"]
    assert made.report["techniques"][0]["knobs"]["keep"] == 0.7, "the threshold is calibrated to what is asked for"
    told = made.report["exits"]
    assert told["shares"]["measured"][0] > 0.5 and told["shares"]["predicted"][0] > 0.5
    assert made.report["latency_ms"]["mean"]["measured"] < made.report["plain"]["latency_ms"]["p50"]
    loaded, x = shoestring.load(tmp_path / "both", job=large, small=small), torch.randn(16, 32)
    assert torch.equal(loaded(x), made.model(x)) and set(loaded.depths.tolist()) <= {0, 1}
    with pytest.raises(Mistake, match=r"cascade of two models.*give small="):
        shoestring.load(tmp_path / "both", job=large)


def test_a_small_model_that_can_not_be_is_refused_with_the_reason(files: tuple[Path, Path], tmp_path: Path) -> None:
    large, small = files
    small.write_text(FILE.replace("Linear(32, 4)", "Linear(32, 5)").replace("eye(4, 32)", "eye(5, 32)"))
    with pytest.raises(Mistake, match="4 classes and one before it 5"):
        shoestring.compress(large, tmp_path / "a", use=[f"Cascade(small={str(small)!r})"])
    with pytest.raises(Mistake, match="nowhere"):
        shoestring.compress(large, tmp_path / "b", use=["Cascade(small='nowhere')"])
    for knobs in (
        {},
        {"small": "a", "loss": 2.0},
        {"small": "a", "measure": "mood"},
        {"small": "a", "delta": 0.1, "keep": 0.9},
    ):
        with pytest.raises(Mistake, match="Cascade"):
            Cascade(**knobs)  # type: ignore[arg-type]
