"""Data in whole runs: by the library, and by the command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoestring
from shoestring.runs.events import event
from shoestring.runs.reports.report import report_of
from shoestring.training.progress import DATA_ENDED

pytestmark = pytest.mark.usefixtures("warm_workers")

JOB = """
import random
import numpy as np
import torch
from torch import nn
from shoestring import Job

class Rows:
    def __len__(self):
        return 40
    def __getitem__(self, number):
        noise = torch.rand(4) + float(np.random.rand()) + random.random()
        return noise, number % 2

def collate(samples):
    return torch.stack([row for row, _ in samples]), torch.tensor([label for _, label in samples])

def job(steps: int = 8, workers: int = 0, ends: bool = False) -> Job:
    if ends:
        return Job(model=lambda: nn.Linear(4, 2), data=lambda: iter([(torch.ones(3, 4), torch.zeros(3).long())] * 5), steps=steps)
    return Job(model=lambda: nn.Linear(4, 2), data=Rows, batch=4, steps=steps, workers=workers, collate=lambda samples: collate(samples))
"""


def command(tmp_path: Path, *words: str) -> Any:
    (tmp_path / "my.py").write_text(JOB)
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "shoestring",
            "train",
            "my.py",
            "--memory",
            "2GiB",
            "--use",
            "FusedOptimizer",
            "--json",
            *words,
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )


def test_fit_goes_round_a_loader_that_is_shorter_than_its_steps() -> None:
    rows = TensorDataset(torch.randn(88, 3), torch.zeros(88, dtype=torch.long))
    model = nn.Linear(3, 2)
    done = shoestring.fit(
        model,
        lambda output, batch: nn.functional.cross_entropy(output, batch[1]),
        DataLoader(rows, batch_size=4),
        steps=100,
    )
    assert len(done.losses) == 100


def test_an_iterator_that_ends_is_a_warning_and_a_state_of_its_own(tmp_path: Path) -> None:
    found = command(tmp_path, "--ends", "--run", "run")
    assert found.returncode == 0, found.stderr
    assert "the data ended after step 5, and 8 steps were asked for" in found.stderr
    told = report_of(tmp_path / "run")
    assert (told.state, told.step, told.why_ended) == ("data ended", 5, "data ended") and DATA_ENDED == event.DATA_ENDED
    assert json.loads(found.stdout)["ended"] == "data ended" and told.weights_sha256
    assert "Data ended" in (tmp_path / "run" / "report.html").read_text()


def test_a_run_with_workers_has_the_weights_of_one_without_and_leaves_no_process(tmp_path: Path) -> None:
    alone, helped = (command(tmp_path, "--workers", str(count), "--run", f"run{count}") for count in (0, 2))
    assert alone.returncode == helped.returncode == 0, helped.stderr
    plain, ahead = json.loads(alone.stdout), json.loads(helped.stdout)
    assert plain["weights_sha256"] == ahead["weights_sha256"] and plain["losses"] == ahead["losses"]
    assert ahead["measured"]["peak_bytes"] == ahead["predicted"]["peak_bytes"]
    assert "not counted: 2 processes for loading data, and up to 4 batches ahead in shared memory" in ahead["basis"]
    left = [path for path in Path("/proc").glob("[0-9]*") if str(tmp_path) in working_folder(path)]
    assert not left


def working_folder(process: Path) -> str:
    try:
        return str((process / "cwd").readlink())
    except OSError:
        return ""
