"""The process is its tensors and an overhead; what a plan does to the tensors must not change the overhead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoestring.core.costs.hardware import Hardware
from shoestring.core.job import Origin
from shoestring.processes.launch import run_worker
from shoestring.processes.standstill import NoAnswer, no_answer
from shoestring.processes.task import Task
from shoestring.training.evidence.plain_only import is_an_answer
from shoestring.training.evidence.rehearsals import Rehearsals
from shoestring.training.evidence.tasks import AnchorTask, TrialTask
from shoestring.training.memory.allocator import following
from tests.models import job

RECURRENT = """
import torch
from torch import nn
from shoestring import Job

class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.memory, self.head = nn.LSTM(32, 32, 2, batch_first=True), nn.Linear(32, 10)
    def forward(self, x):
        return self.head(self.memory(x)[0][:, -1])

def job() -> Job:
    x, y = torch.randn(256, 64, 32), torch.zeros(256, dtype=torch.long)
    return Job(model=Recurrent, data=lambda: [(x, y)] * 9, steps=3)
"""


def test_a_workspace_that_its_kernel_leaves_half_empty_does_not_make_the_rest_of_the_process_look_smaller(
    tmp_path: Path,
) -> None:
    path = tmp_path / "recurrent.py"
    path.write_text(RECURRENT)
    over = (
        run_worker(AnchorTask(file=str(path), variants={"": ()}, memory=True), following().environment)
        .steps[""]
        .overheads
    )
    assert min(over.values()) > over["forward (start)"] - 2**21


def test_a_silent_worker_is_told_with_what_it_was_to_do() -> None:
    def worker(task: Task[Any], environment: Mapping[str, str]) -> Any:
        raise no_answer(task, "net.py line 3")

    rehearsals = Rehearsals(replace(job("chain"), origin=Origin("net.py")), Hardware(), worker)
    told = "measuring a real step: no result came for 30 min, and the job stands in net.py line 3"
    with pytest.raises(NoAnswer, match=told) as error:
        rehearsals.ask_worker(TrialTask(file="net.py"), {}, "measuring a real step")
    assert is_an_answer(error.value), "plain steps would only stand still again"
