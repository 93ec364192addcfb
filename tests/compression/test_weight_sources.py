"""Weights alone, with a job that makes their model."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import shoestring
from shoestring import Job
from shoestring.commands.main import run
from shoestring.core.errors import Mistake


def job() -> Job:
    draw = torch.Generator().manual_seed(0)
    data = [(torch.randn(8, 16, generator=draw), torch.randint(0, 4, (8,), generator=draw)) for _ in range(12)]
    return Job(model=lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), data=lambda: data)


def test_a_safetensors_file_is_compressed_with_the_job_that_makes_its_model(tmp_path: Path) -> None:
    torch.manual_seed(3)
    trained = job().model()
    save_file(trained.state_dict(), tmp_path / "model.safetensors")
    torch.save(trained.state_dict(), tmp_path / "model.pt")
    for source in (tmp_path / "model.safetensors", tmp_path / "model.pt", tmp_path):
        small = shoestring.compress(source, tmp_path / f"small-{source.suffix}", use=["Half()"], job=job())
        x = torch.randn(5, 16)
        assert torch.allclose(small.model(x), trained(x), atol=1e-2) and not torch.allclose(small.model(x), job().model()(x), atol=1e-2)


def test_weights_that_do_not_fit_are_named_and_pickles_and_missing_jobs_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = job().model().state_dict()
    save_file(state | {"0.weight": torch.zeros(32, 15)}, tmp_path / "other.safetensors")
    with pytest.raises(Mistake, match=r"0\.weight"):
        shoestring.compress(tmp_path / "other.safetensors", tmp_path / "small", use=["Half()"], job=job())
    torch.save(job().model(), tmp_path / "model.pt")
    torch.save({"model": state, "step": 3}, tmp_path / "nested.pt")
    torch.save({name: one for name, one in state.items() if name != "2.bias"}, tmp_path / "short.pt")
    for name, said in (("model.pt", "pickle, which can run code"), ("nested.pt", "with model in it"), ("short.pt", r"has no 2\.bias")):
        with pytest.raises(Mistake, match=said):
            shoestring.compress(tmp_path / name, tmp_path / "small", use=["Half()"], job=job())
    with pytest.raises(Mistake, match="give job="):
        shoestring.compress(tmp_path / "other.safetensors", tmp_path / "small", use=["Half()"])
    assert run(["compress", str(tmp_path / "other.safetensors"), "--size", "1MB"]) == 2 and "--job FILE" in capsys.readouterr().err
    assert run(["compress", str(tmp_path / "model.onnx"), "--size", "1MB"]) == 2 and "is an ONNX file" in capsys.readouterr().err
