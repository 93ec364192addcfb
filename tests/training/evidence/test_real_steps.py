"""Trials: a few real steps before a plan is chosen. An imagined group's have the right bytes, and numbers that mean nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from shoestring.core.costs.hardware import Hardware
from shoestring.core.errors import Crashed, Mistake
from shoestring.core.technique import text
from shoestring.jobfile import load_job
from shoestring.processes.launch import run_worker
from shoestring.processes.task import R, Task
from shoestring.training.data_parallel.data_parallel import DataParallel
from shoestring.training.data_parallel.sharding.shard import Shard
from shoestring.training.evidence.tasks import Position, TrialTask, specs_of
from shoestring.training.execution.training import trial
from shoestring.training.memory.optimizers.fused import FusedOptimizer
from shoestring.training.planning.planner import Planner
from shoestring.training.technique import TrainingTechnique as Technique

pytestmark = pytest.mark.usefixtures("warm_workers")

JOB = """
import torch
from torch import nn
from shoestring import Job

def job() -> Job:
    return Job(model=lambda: nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)), nn.Linear(64, 4)),
               data=lambda: [(torch.randn(8, 64), torch.arange(8) % 4)] * 8)
"""


@pytest.mark.parametrize("stage", [2, 3])
def test_a_trial_of_an_imagined_group_asks_for_no_finite_loss(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.py").write_text(JOB)
    monkeypatch.setattr(
        "shoestring.training.loop.math.isfinite", lambda loss: False
    )  # as what was not gathered may lead to
    task = TrialTask(
        file=str(tmp_path / "job.py"), techniques=specs_of([Shard(stage)]), steps=3, position=Position(0, 2)
    )
    assert trial(task, lambda event: None).steps == 3


def test_a_trial_of_one_process_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job.py").write_text(JOB)
    monkeypatch.setattr("shoestring.training.loop.math.isfinite", lambda loss: False)
    with pytest.raises(Mistake, match="the loss became"):
        trial(TrialTask(file=str(tmp_path / "job.py"), steps=3), lambda event: None)


def test_what_the_machine_has_no_room_for_is_estimated_and_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.py").write_text(JOB)
    tasks: list[str] = []

    def worker(task: Task[R], environment: Mapping[str, str], /) -> R:
        tasks.append(task.kind)
        return run_worker(task, environment)

    planner = Planner(load_job(tmp_path / "job.py", {}), Hardware(), worker)
    ledger = planner.ledger()
    assert (
        "from a trial of 12 steps" in planner.outcome_of(ledger, None, (FusedOptimizer(),)).chosen.basis
        and tasks.pop() == "trial"
    )
    monkeypatch.setattr("shoestring.training.planning.predict.memory_free", lambda: 1 << 20)
    assert (
        "no room to try it" in planner.outcome_of(ledger, None, (FusedOptimizer(),)).chosen.basis
        and "trial" not in tasks
    )


@pytest.mark.parametrize(("devices", "use"), [(1, FusedOptimizer()), (2, DataParallel())])
def test_a_trial_that_ends_badly_says_what_was_tried(devices: int, use: Technique, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    why = "the workers lost each other (worker 1 of 2 did not come within 300 s): " + 200 * "." + " that is all"

    def worker(task: Task[R], environment: Mapping[str, str], /) -> R:
        if isinstance(task, TrialTask):
            raise Crashed(why)
        return run_worker(task, environment)

    planner = Planner(load_job(tmp_path / "job.py", {}), Hardware(), worker, devices=devices, here=devices)
    with pytest.raises(
        (Crashed, Mistake), match=rf"trying {re.escape(text(use))} for \d+ real steps: {re.escape(why)}$"
    ):
        planner.outcome_of(planner.ledger(), None, (use,))
