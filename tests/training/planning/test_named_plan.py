"""Every way to name techniques goes through one door: what conflicts, is refused for the job or is further than allowed does not pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoestring
from shoestring import Job, Mistake
from shoestring.commands.main import main
from shoestring.core.exactness import Exactness, check_level
from shoestring.runs.folder import Folder
from shoestring.training.data_parallel.data_parallel import DataParallel
from shoestring.training.memory.accumulate import Accumulate
from shoestring.training.memory.adapters.low_rank import LowRank
from shoestring.training.memory.allocator import Allocator
from shoestring.training.memory.offload.offload_model import OffloadModel
from shoestring.training.memory.optimizers.fused import FusedOptimizer
from shoestring.training.memory.optimizers.step_in_backward import StepInBackward
from shoestring.training.memory.recompute.checkpoint import Checkpoint
from shoestring.training.planning.named_plan import given_techniques
from shoestring.training.planning.plan import TrainingDetails, training_plan
from shoestring.training.technique import TrainingTechnique


def made_job(clip: float = 0.0) -> Job:
    data = [(torch.ones(4, 4) * number, torch.zeros(4, 4)) for number in range(1, 4)]
    return Job(
        model=lambda: nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3))),
        data=lambda: data,
        loss=lambda output, batch: (output - batch[1]).square().mean(),
        steps=2,
        clip=clip,
    )


DOORS: dict[str, Callable[[Job, tuple[TrainingTechnique, ...]], Any]] = {
    "plan": lambda job, use: shoestring.plan(job, use=use),
    "train": lambda job, use: list(shoestring.train(job, use)),
    "train by a Plan": lambda job, use: list(shoestring.train(job, training_plan(use))),
    "verify": shoestring.verify,
}


@pytest.mark.parametrize("door", DOORS)
def test_a_job_that_clips_refuses_what_steps_before_the_norm_is_known(door: str) -> None:
    with pytest.raises(Mistake, match="clips gradients"):
        DOORS[door](made_job(clip=1.0), (StepInBackward(),))


@pytest.mark.parametrize("door", DOORS)
def test_techniques_that_conflict_are_refused(door: str) -> None:
    with pytest.raises(Mistake, match="can't be combined"):
        DOORS[door](made_job(), (StepInBackward(), Accumulate(2)))


def test_a_plan_for_another_job_is_checked_for_this_one_and_one_for_this_is_not_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = made_job()
    outcome = shoestring.plan(job, use=[StepInBackward()])
    with pytest.raises(Mistake, match="clips gradients"):
        list(shoestring.train(replace(job, clip=1.0), outcome))
    monkeypatch.setattr(
        "shoestring.training.planning.named_plan.Planner", lambda *args, **named: pytest.fail("it was checked")
    )
    assert len(list(shoestring.train(job, outcome))) == 2


def test_what_is_named_may_be_changed_and_is_told() -> None:
    with pytest.warns(UserWarning, match=r"LowRank.* is changed for this job"):
        list(shoestring.train(made_job(), (LowRank(rank=1),)))
    assert shoestring.plan(made_job(), use=[LowRank(rank=1)]).chosen.exactness is Exactness.CHANGED


def test_exact_refuses_whoever_chose_it() -> None:
    with pytest.raises(Mistake, match=r"to rounding for this job.*exact"):
        shoestring.plan(made_job(), use=[FusedOptimizer()], exact="bits")
    with pytest.raises(Mistake, match="give --inexact"):
        check_level(Exactness.CHANGED, "distribution", "this plan")
    check_level(Exactness.CHANGED, None, "this plan")


def test_what_can_be_used_still_is() -> None:
    assert shoestring.verify(made_job(), (Checkpoint(every=1), StepInBackward())).same_bits


FILE = """
import torch
from torch import nn
from shoestring import Job

def job(clip: float = 0.0) -> Job:
    return Job(model=lambda: nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3))),
               data=lambda: [(torch.ones(4, 4) * number, torch.zeros(4, 4)) for number in range(1, 4)],
               loss=lambda output, batch: (output - batch[1]).square().mean(), steps=2, clip=clip)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(FILE)
    return tmp_path / "net.py"


@pytest.mark.usefixtures("warm_workers")
def test_a_job_file_is_trained_by_what_plan_allows_for_it(file: Path) -> None:
    assert shoestring.plan(file, use=[OffloadModel()]).chosen.techniques == (OffloadModel(),)
    assert len(list(shoestring.train(file, (OffloadModel(),)))) == 2
    assert shoestring.verify(file, (OffloadModel(),), 2).same_bits
    with pytest.raises(Mistake, match="use a job file"):
        list(shoestring.train(made_job(), (OffloadModel(),)))


@pytest.mark.usefixtures("warm_workers")
def test_what_has_no_effect_in_a_process_that_runs_is_told(file: Path) -> None:
    with pytest.warns(UserWarning, match=r"Allocator.* has no effect here"):
        list(shoestring.train(file, (Allocator(kind="huge"),)))


@pytest.mark.usefixtures("warm_workers")
@pytest.mark.parametrize(("devices", "reason"), [(1, "clips gradients"), (2, "can't be combined")])
def test_a_plan_for_another_job_is_checked_where_a_run_is_kept(
    devices: int, reason: str, file: Path, tmp_path: Path
) -> None:
    plan = training_plan(
        (StepInBackward(), *([DataParallel()] if devices > 1 else [])), details=TrainingDetails(world=devices)
    )
    with pytest.raises(Mistake, match=reason):
        list(shoestring.train(file, plan, run=tmp_path / "run", devices=devices, clip=1.0))
    assert not (tmp_path / "run" / "plan.json").exists()


def forged(folder: Path) -> None:
    """A run's plan, changed by somebody who can write there."""
    told = json.loads((folder / "plan.json").read_text())
    told.pop("sha256", None)
    told["chosen"]["techniques"] = [{"name": "StepInBackward", "knobs": {}}]
    Folder(folder).write("plan.json", told)


def test_a_plan_that_a_run_of_a_script_keeps_is_checked(tmp_path: Path) -> None:
    list(islice(shoestring.train(made_job(clip=1.0), (), run=tmp_path / "run"), 1))
    forged(tmp_path / "run")
    with pytest.raises(Mistake, match="clips gradients"):
        list(shoestring.train(made_job(clip=1.0), (), run=tmp_path / "run"))


@pytest.mark.usefixtures("warm_workers")
def test_a_plan_that_a_run_of_the_command_keeps_is_checked(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    list(islice(shoestring.train(file, (), run=tmp_path / "run", clip=1.0), 1))
    forged(tmp_path / "run")
    with pytest.raises(SystemExit, match="2"):
        main(["train", str(file), "--clip", "1.0", "--run", str(tmp_path / "run")])
    assert "clips gradients" in capsys.readouterr().err


def test_a_script_names_techniques_as_the_command_does() -> None:
    assert given_techniques(["Checkpoint(every=2)", FusedOptimizer()]) == (Checkpoint(every=2), FusedOptimizer())
    assert given_techniques(FusedOptimizer()) == given_techniques("FusedOptimizer()") == (FusedOptimizer(),)
    as_text = [step.loss for step in shoestring.train(made_job(), ["Accumulate(pieces=2)"])]
    assert as_text == [step.loss for step in shoestring.train(made_job(), (Accumulate(2),))]


@pytest.mark.parametrize("given", [3, None, [Checkpoint], [["Checkpoint()"]]])
def test_what_is_no_technique_is_refused_by_what_it_is(given: Any) -> None:
    with pytest.raises(Mistake, match=r"is no technique: give the result of shoestring\.plan, or techniques such as"):
        list(shoestring.train(made_job(), given))
