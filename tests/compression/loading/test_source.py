"""A run that a script has begun is compressed with the script's Job, or a job file that makes the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoestring
from shoestring import Job, Mistake
from shoestring.commands.main import run as command

BATCHES = [(torch.randn(16, 8), torch.arange(16) % 2) for _ in range(12)]
FILE = """
import torch
from torch import nn
from shoestring import Job

def job(width: int = 8) -> Job:
    return Job(model=lambda: nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2)),
               data=[(torch.randn(16, 8), torch.arange(16) % 2) for _ in range(12)])
"""


def job_of_width(width: int = 8, **more: Any) -> Job:
    return Job(
        model=lambda: nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2)), data=BATCHES, steps=2, **more
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for _ in shoestring.train(job_of_width(), run=tmp_path / "a"):
        pass
    (tmp_path / "file.py").write_text(FILE)
    return tmp_path / "a"


def test_the_trained_weights_are_compressed_and_the_script_s_model_stays(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = job_of_width().model()
    before = {name: value.clone() for name, value in own.state_dict().items()}
    small = shoestring.compress(run, run.parent / "small", use=["Half()"], job=Job(model=lambda: own, data=BATCHES))
    assert all(torch.equal(value, before[name]) for name, value in own.state_dict().items())
    kept, trained = (
        small.model(BATCHES[0][0]),
        shoestring.compress(run, run.parent / "other", use=["Half()"], job=job_of_width()),
    )
    assert torch.equal(kept, trained.model(BATCHES[0][0])) and not torch.allclose(kept, own(BATCHES[0][0]), atol=1e-5)
    assert (
        command(
            [
                "compress",
                str(run),
                "--job",
                str(run.parent / "file.py"),
                "--use",
                "Half()",
                "--out",
                str(run.parent / "c"),
            ]
        )
        == 0
    )
    assert torch.equal(shoestring.load(run.parent / "c", job=run.parent / "file.py")(BATCHES[0][0]), kept)


def test_without_a_job_it_is_told_what_to_give(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["compress", str(run), "--use", "Half()"]) != 0
    assert "was begun by a script" in (said := capsys.readouterr().err) and "--job" in said
    with pytest.raises(Mistake, match="give job=, a file"):
        shoestring.compress(run, run.parent / "small", use=["Half()"])
    with pytest.raises(
        Mistake, match=r"0\.weight has the shape \(8, 8\) in the checkpoint of step 2 and \(4, 8\) in the job's model"
    ):
        shoestring.compress(run, run.parent / "small", use=["Half()"], job=job_of_width(4))
