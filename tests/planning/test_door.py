"""Every way to name techniques goes through one door: what conflicts, is refused for the job or is further than allowed does not pass."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import shoestring
from shoestring import Job, Mistake
from shoestring.core.exactness import Exactness, check_level
from shoestring.core.training import TrainingTechnique
from shoestring.memory.accumulate import Accumulate
from shoestring.memory.checkpoint import Checkpoint
from shoestring.memory.fused import Fused
from shoestring.memory.low_rank import LowRank
from shoestring.memory.step_in_backward import StepInBackward
from shoestring.planning.plan import Plan


def made_job(clip: float = 0.0) -> Job:
    data = [(torch.ones(4, 4) * number, torch.zeros(4, 4)) for number in range(1, 4)]
    return Job(model=lambda: nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3))),
               data=lambda: data, loss=lambda output, batch: (output - batch[1]).square().mean(), steps=2, clip=clip)


DOORS: dict[str, Callable[[Job, tuple[TrainingTechnique, ...]], Any]] = {
    "plan": lambda job, use: shoestring.plan(job, use=use),
    "train": lambda job, use: list(shoestring.train(job, use)),
    "train by a Plan": lambda job, use: list(shoestring.train(job, Plan(use))),
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


def test_a_plan_for_another_job_is_checked_for_this_one_and_one_for_this_is_not_again(monkeypatch: pytest.MonkeyPatch) -> None:
    job = made_job()
    outcome = shoestring.plan(job, use=[StepInBackward()])
    with pytest.raises(Mistake, match="clips gradients"):
        list(shoestring.train(replace(job, clip=1.0), outcome))
    monkeypatch.setattr("shoestring.planning.door.check_named", lambda *args: pytest.fail("it was checked"))
    assert len(list(shoestring.train(job, outcome))) == 2


def test_what_is_named_may_be_changed_and_is_told() -> None:
    with pytest.warns(UserWarning, match=r"LowRank.* is changed for this job"):
        list(shoestring.train(made_job(), (LowRank(rank=1),)))
    assert shoestring.plan(made_job(), use=[LowRank(rank=1)]).chosen.exactness is Exactness.CHANGED


def test_exact_refuses_whoever_chose_it() -> None:
    with pytest.raises(Mistake, match=r"to rounding for this job.*exact"):
        shoestring.plan(made_job(), use=[Fused()], exact="bits")
    with pytest.raises(Mistake, match="give --inexact"):
        check_level(Exactness.CHANGED, "draws", "this plan")
    check_level(Exactness.CHANGED, None, "this plan")


def test_what_can_be_used_still_is() -> None:
    assert shoestring.verify(made_job(), (Checkpoint(every=1), StepInBackward())).same_bits
