"""A run goes on with any number of workers: the same losses, whatever the workers share and however many there are."""
from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoestring.core.technique import described
from shoestring.core.training import TrainingTechnique as Technique
from shoestring.parallel.average import Average
from shoestring.parallel.shard import Shard
from shoestring.processes.group.launch import run_group
from shoestring.processes.launch import run_worker
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
    task = train_task(folder / "job.py", steps, map(described, techniques), folder / "run", {"steps": 100})
    done = run_worker(task, {}) if workers == 1 else run_group(task, {}, devices=workers)
    return list(done.losses)


@pytest.mark.parametrize("technique", [*(pytest.param(one, marks=pytest.mark.slow) for one in (Average(), Shard(1), Shard(2))), Shard(3)])
def test_two_workers_then_one_then_three(technique: Technique, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    alone = tmp_path / "alone"
    for folder in (alone / "run", tmp_path / "run"):
        folder.mkdir(parents=True)
    (alone / "job.py").write_text(JOB)
    plain = losses(alone, (), 1, 9)
    found = [loss for workers, steps in ((2, 3), (1, 6), (3, 9)) for loss in losses(tmp_path, (technique,), workers, steps)]
    assert found == pytest.approx(plain, rel=1e-6) and len(found) == 9
    begun = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines() if '"begun"' in line]
    assert [(event["step"], event.get("world", 1)) for event in begun] == [(0, 2), (3, 1), (6, 3)]
