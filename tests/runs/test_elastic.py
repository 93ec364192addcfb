"""A run goes on with any number of workers: the same losses, whatever the workers share and however many there are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shoestring.core.technique import technique_json
from shoestring.processes.group.launch import run_group
from shoestring.processes.launch import run_worker
from shoestring.processes.nodes import Team
from shoestring.runs.folder import Folder
from shoestring.runs.reports.export import checkpoint_of, export_weights
from shoestring.runs.weights.tensors import TensorFile
from shoestring.training.data_parallel.data_parallel import DataParallel
from shoestring.training.data_parallel.sharding.shard import Shard
from shoestring.training.pipeline.pipeline import Pipeline
from shoestring.training.technique import TrainingTechnique as Technique
from tests.tasks import train_task

pytestmark = pytest.mark.usefixtures("warm_workers")

JOB = """
import torch
from torch import nn
from torch.utils.data import Dataset
from shoestring import Job

class Samples(Dataset):
    def __len__(self):
        return 50
    def __getitem__(self, number):
        x = torch.randn(32, generator=torch.Generator().manual_seed(number))
        return x, x[:4].argmax()

def job() -> Job:
    return Job(model=lambda: nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)), nn.Linear(32, 4)),
               data=Samples, batch=7, clip=1.0)
"""


def losses(folder: Path, techniques: tuple[Technique, ...], workers: int, steps: int) -> list[float]:
    """Train up to a step, alone or in a group, and tell the losses of the steps that were done now."""
    task = train_task(folder / "job.py", steps, map(technique_json, techniques), folder / "run", {"steps": 100})
    done = run_worker(task, {}) if workers == 1 else run_group(task, {}, Team(workers))
    return list(done.losses)


@pytest.mark.parametrize(
    "technique",
    [*(pytest.param(one, marks=pytest.mark.slow) for one in (DataParallel(), Shard(1), Shard(2))), Shard(3)],
)
def test_two_workers_then_one_then_three(technique: Technique, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    alone = tmp_path / "alone"
    for folder in (alone / "run", tmp_path / "run"):
        folder.mkdir(parents=True)
    (alone / "job.py").write_text(JOB)
    plain = losses(alone, (), 1, 9)
    found = [
        loss for workers, steps in ((2, 3), (1, 6), (3, 9)) for loss in losses(tmp_path, (technique,), workers, steps)
    ]
    assert found == pytest.approx(plain, rel=1e-6) and len(found) == 9
    begun = [
        json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines() if '"begun"' in line
    ]
    assert [(event["step"], event.get("world", 1)) for event in begun] == [(0, 2), (3, 1), (6, 3)]


@pytest.mark.parametrize(
    "stages",
    [Pipeline(2, 3), pytest.param(Pipeline(2, 4, "zero-bubble", balance=(1, 2)), marks=pytest.mark.slow)],
    ids=str,
)
def test_two_stages_then_one_process_then_two_copies_of_two_stages(stages: Pipeline, tmp_path: Path) -> None:
    """The same losses as one process all the way, and weights that can be taken away."""
    alone = tmp_path / "alone"
    for folder in (alone, tmp_path):
        (folder / "run").mkdir(parents=True)
        (folder / "job.py").write_text(JOB)
    plain = losses(alone, (), 1, 9)
    found = [
        loss
        for techniques, workers, steps in (((stages,), 2, 3), ((), 1, 6), ((stages, DataParallel()), 4, 9))
        for loss in losses(tmp_path, techniques, workers, steps)
    ]
    assert found == pytest.approx(plain, rel=1e-5) and len(found) == 9
    expected, weights = (
        TensorFile(export_weights(checkpoint_of(Folder(folder / "run"), None), folder / "weights.safetensors"))
        for folder in (alone, tmp_path)
    )
    assert sorted(expected) == sorted(weights)
    assert all(torch.allclose(weights[name], value, rtol=1e-4, atol=1e-5) for name, value in expected.items())
