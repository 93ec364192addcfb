"""Devices follow the Job's optimizer, clip and schedule, or the run warns that they don't."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import shoestring
from shoestring.core.clients.local import Local
from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.federated.options import FederateOptions
from shoestring.federated.planning.prepare import prepare_federation
from shoestring.federated.techniques.local_training.scaffold import Scaffold
from tests.federated.simulation.cohort.fedavg import PlainSteps, by_hand, by_shoestring, initial
from tests.federated.simulation.cohort.test_agreement import CLOSE, job_of

LOCAL = Local(epochs=2, batch=6, lr=0.05)


class Clipped(PlainSteps):
    def __init__(self, model: nn.Module, job: Job) -> None:
        super().__init__(model, job)
        self.model = model

    def step(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        super().step()


class Decaying(PlainSteps):
    """In every round anew."""

    def __init__(self, model: nn.Module, job: Job) -> None:
        super().__init__(model, job)
        self.schedule = decay(self.optimizer)

    def step(self) -> None:
        super().step()
        self.schedule.step()


def decay(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)


@pytest.mark.parametrize(
    ("changes", "steps", "said"),
    [
        ({"clip": 0.1}, Clipped, "clip=0.1"),
        ({"local": replace(LOCAL, clip=0.1)}, Clipped, "clip=0.1"),
        ({"schedule": decay}, Decaying, "schedule"),
    ],
)
def test_clip_and_schedule_of_a_job_hold_for_the_steps_of_devices(
    changes: dict[str, Any], steps: Any, said: str
) -> None:
    job = job_of({"local": LOCAL, **changes})
    right, start = by_hand(job, 2, steps), initial(job)
    found, simulation = by_shoestring(job, 2)
    assert float((found - right).norm() / (right - start).norm()) <= CLOSE
    assert float((by_hand(job, 2) - right).norm() / (right - start).norm()) > 0.01, "it changes something"
    assert simulation.given.how.kind == "sequential" and said in simulation.given.how.why


def test_a_schedule_that_wants_steps_is_given_those_of_the_device_and_one_of_epochs_is_stepped_by_epoch() -> None:
    seen = []

    def schedule(optimizer: Any, steps: int) -> Any:
        seen.append(steps)
        return shoestring.PerEpoch(decay(optimizer))

    by_shoestring(job_of({"local": LOCAL, "schedule": schedule}), 1)
    assert {10, 8, 4, 2, 6} <= set(seen)  # of 30, 24, 7, at most 6 and 13 records


def test_what_devices_do_not_follow_is_told_with_what_to_give_instead() -> None:
    own = lambda parameters: torch.optim.Adam(parameters, lr=0.1)  # noqa: E731
    job = job_of({"optimizer": own, "patience": 3, "validate": lambda model: {"loss": 0.0}})
    assert "Local(optimizer=...)" in prepare_federation(job, FederateOptions(per_round=8)).how.why
    with pytest.warns(UserWarning, match="patience"):
        assert any("patience" in one for one in shoestring.federate(job, 1, 8, use=()).report["warnings"])
    both = {"optimizer": own, "local": replace(LOCAL, lr=None, optimizer=own)}
    assert "(optimizer" not in prepare_federation(job_of(both), FederateOptions(per_round=8)).how.why


def test_devices_step_by_the_jobs_optimizer_where_local_says_nothing_else() -> None:
    own = lambda parameters: torch.optim.Adam(parameters, lr=0.1)  # noqa: E731
    silent = replace(LOCAL, lr=None)
    found, simulation = by_shoestring(job_of({"local": silent, "optimizer": own}), 2)
    assert torch.equal(found, by_shoestring(job_of({"local": replace(silent, optimizer=own)}), 2)[0])
    assert not torch.allclose(found, by_shoestring(job_of({"local": silent}), 2)[0]), (
        "plain SGD where nobody says anything"
    )
    assert "devices step by Job(optimizer=...)" in simulation.given.how.why
    with pytest.raises(Mistake, match="give one of them"):
        replace(LOCAL, optimizer=own)


def test_what_can_not_be_done_in_a_devices_work_is_refused() -> None:
    with pytest.raises(Mistake, match="a constant step size"):
        Scaffold().apply(prepare_federation(job_of({"clip": 1.0}), FederateOptions(per_round=8)).plain)
    with pytest.raises(Mistake, match="ReduceLROnPlateau"):
        prepare_federation(
            job_of({"schedule": torch.optim.lr_scheduler.ReduceLROnPlateau}), FederateOptions(per_round=8)
        )
