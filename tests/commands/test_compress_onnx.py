"""`compress --to onnx` and `export --to onnx`: the file keeps the size that was asked for, and any run can be exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import shoestring
from shoestring.commands.main import run

onnxruntime = pytest.importorskip("onnxruntime")

JOB = """
import torch
from torch import nn
from shoestring import Job

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(32, 128), nn.Linear(128, 5)

    def forward(self, features):
        return self.last(torch.relu(self.first(features)))

def job() -> Job:
    draw = torch.Generator().manual_seed(0)
    data = [(torch.randn(16, 32, generator=draw), torch.randint(0, 5, (16,), generator=draw)) for _ in range(30)]
    return Job(model=Net, data=lambda: data, steps=2)
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(JOB)
    return path


@pytest.mark.slow
def test_the_onnx_file_keeps_the_size_or_is_refused_with_the_one_that_it_would_have(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compress", str(job), "--to", "onnx", "--json"]
    assert run([*words, "--size", "7KB", "--out", str(tmp_path / "small")]) == 0
    told = json.loads(capsys.readouterr().out)["onnx"]
    assert told["bytes"] == (tmp_path / "small" / "model.onnx").stat().st_size <= 7000
    assert 0.9 < told["fidelity"]["mean"] < 1 and told["fidelity"]["n"] > 100
    assert run([*words, "--size", "3700", "--out", str(tmp_path / "tiny")]) == 3
    said = capsys.readouterr()
    assert "smallest ONNX file that was found takes" in said.err and json.loads(said.out)["nearest"]
    assert not (tmp_path / "tiny").exists() and not list(tmp_path.glob("*.draft*"))


@pytest.mark.slow
def test_any_run_is_exported_to_onnx(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    for _ in shoestring.train(str(job), (), run=folder):
        pass
    assert run(["export", str(folder), "--job", str(job), "--to", "onnx", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    runner = onnxruntime.InferenceSession(told["path"], providers=["CPUExecutionProvider"])
    assert [one.name for one in runner.get_inputs()] == ["features"] and told["step"] == 2
    assert runner.run(None, {"features": torch.randn(3, 32).numpy()})[0].shape == (3, 5)
    assert (
        run(["export", str(folder), "--job", str(job), "--to", "onnx"]) == 2
        and "is there already" in capsys.readouterr().err
    )
