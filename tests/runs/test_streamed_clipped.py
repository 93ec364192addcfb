"""Streamed runs whose gradients wait on disk: killed in the second pass they go on with the same bits; frozen weights and validation are
as they are in memory, in the bytes that were predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shoestring.core.errors import Crashed
from shoestring.jobfile import load_job
from shoestring.processes.launch import run_worker
from shoestring.runs.checkpoints.checkpoints import newest_good
from shoestring.runs.reports.export import export_weights
from shoestring.runs.weights.tensors import TensorFile
from shoestring.training.evidence.rehearse import rehearse
from shoestring.training.execution.tasks import TrainResult
from shoestring.training.memory.accumulate import Accumulate
from shoestring.training.memory.offload.offload_model import OffloadModel
from tests.records import records, steps_in
from tests.tasks import train_task

pytestmark = pytest.mark.usefixtures("warm_workers")

JOB = """
import os, signal
import torch
from torch import nn
from shoestring import Job

def data():
    draw = torch.Generator().manual_seed(0)
    while True:
        x = torch.randn(8, 130, generator=draw)
        yield x, x[:, :10].argmax(1)

class Deadly(torch.optim.SGD):   # kills its process in an update, once
    def __init__(self, parameters, flag):
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.flag, self.calls = flag, 0

    def step(self, closure=None):
        grads = [one.grad for group in self.param_groups for one in group["params"] if one.grad is not None]
        self.calls += sum(one.square().sum() for one in grads) < 0.0101   # else it is being tried, and nothing is clipped
        if self.flag and self.calls == 27 and not os.path.exists(self.flag):
            open(self.flag, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(closure)

def model():
    block = lambda: nn.Sequential(nn.Linear(130, 130), nn.GELU())
    made = nn.Sequential(*(block() for _ in range(5)), nn.Linear(130, 10))
    made[0].requires_grad_(False)
    made[2][0].bias.requires_grad_(False)
    made[3][0].weight.requires_grad_(False)
    return made

def job(steps: int = 6, flag: str = "") -> Job:
    return Job(model=model, data=data, steps=steps, clip=0.1, optimizer=lambda parameters: Deadly(parameters, flag),
               held_out=lambda: [batch for batch, _ in zip(data(), range(3))], every=2,
               metrics=lambda output, batch: {"accuracy": (output.argmax(1) == batch[1]).float().mean()})
"""
ACCUMULATE = {"name": "Accumulate", "knobs": {"pieces": 2}}
STREAM = {"name": "OffloadModel", "knobs": {}}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("job") / "job.py"
    path.write_text(JOB)
    return path


def trained(
    job: Path, folder: Path, *techniques: dict[str, Any], steps: int = 6, flag: str = "", weights: str = ""
) -> TrainResult:
    folder.mkdir(exist_ok=True)
    return run_worker(train_task(job, steps, techniques, folder, {"steps": 2}, {"flag": flag}, weights), {})


@pytest.fixture(scope="module")
def undisturbed(job: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in memory, with its weights as a file."""
    folder = tmp_path_factory.mktemp("plain")
    trained(job, folder, ACCUMULATE, weights=str(folder / "plain.safetensors"))
    return folder


def test_killed_in_the_second_pass_it_goes_on_with_the_same_bits(job: Path, undisturbed: Path, tmp_path: Path) -> None:
    with pytest.raises(Crashed, match="SIGKILL"):
        trained(job, tmp_path / "run", ACCUMULATE, STREAM, flag=str(tmp_path / "killed"))
    done = [event["step"] for event in steps_in(records(tmp_path / "run"))]
    assert (tmp_path / "killed").exists() and len(done) == 3, (
        "it was killed in the fourth update, half of which was done"
    )
    result = trained(job, tmp_path / "run", ACCUMULATE, STREAM, flag=str(tmp_path / "killed"))
    checkpoint, damaged = newest_good(tmp_path / "run" / "checkpoints")
    assert result.steps == 6 and checkpoint is not None and not damaged
    export_weights(checkpoint, tmp_path / "out.safetensors")
    out, expected = TensorFile(tmp_path / "out.safetensors"), TensorFile(undisturbed / "plain.safetensors")
    assert set(out) == set(expected) and all(torch.equal(out[name], expected[name]) for name in expected)


def test_every_step_moves_what_was_predicted_and_validation_finds_what_it_finds_in_memory(
    job: Path, undisturbed: Path, tmp_path: Path
) -> None:
    trained(job, tmp_path / "run", ACCUMULATE, STREAM)
    predicted = rehearse(load_job(job, {}), (Accumulate(2), OffloadModel()))
    moved = [event["moved"] for event in steps_in(records(tmp_path / "run"))]
    assert moved == [predicted.moved[0], *[predicted.moved[-1]] * 5]
    assert (tmp_path / "run" / "stream.bin").stat().st_size == predicted.stored
    found, expected = (
        [event["metrics"] for event in records(folder) if event["event"] == "validated"]
        for folder in (tmp_path / "run", undisturbed)
    )
    assert found == expected and len(found) == 3
