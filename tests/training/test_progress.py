"""The course of a training: epochs, validations, the best of them, and why it ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shoestring
from shoestring import Job, Mistake

BATCHES = [
    (torch.randn(4, 3, generator=torch.Generator().manual_seed(number)), torch.tensor([0, 1, 1, 0]))
    for number in range(6)
]


def job(**more: Any) -> Job:
    return Job(
        model=lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2)),
        data=lambda: BATCHES[:4],
        held_out=lambda: BATCHES[4:],
        **more,
    )


def accuracy(output: torch.Tensor, batch: Any) -> dict[str, torch.Tensor]:
    return {"accuracy": (output.argmax(1) == batch[1]).float().mean()}


def test_epochs_end_a_training_and_every_epoch_is_validated() -> None:
    steps = list(shoestring.train(job(epochs=2, metrics=accuracy)))
    assert len(steps) == 8
    assert [step.number for step in steps if step.metrics] == [4, 8]
    assert set(steps[3].metrics) == {"loss", "accuracy"}


def test_a_validation_changes_nothing_in_the_training() -> None:
    losses = [[step.loss for step in shoestring.train(job(steps=6, every=every))] for every in (1, 1000)]
    assert losses[0] == losses[1]


def test_a_training_that_gets_no_better_ends() -> None:
    found = iter([0.5, 0.7, 0.6, 0.7, 0.1])
    wanted = Job(
        model=lambda: nn.Linear(3, 2),
        data=lambda: BATCHES,
        validate=lambda model: {"f1": next(found)},
        goal="max f1",
        every=1,
        patience=2,
        steps=50,
    )
    assert [step.metrics["f1"] for step in shoestring.train(wanted)] == [0.5, 0.7, 0.6, 0.7]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"every": "often"}, "every='often'"),
        ({"every": 0}, "every=0"),
        ({"goal": "accuracy"}, "goal='accuracy'"),
        ({"validate": lambda model: {}}, "two ways"),
        ({"epochs": -1}, "epochs=-1"),
    ],
)
def test_what_is_wrong_in_a_job_is_told_at_once(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(Mistake, match=said):
        job(**wrong)


def test_a_goal_that_is_not_measured_is_told_with_what_is() -> None:
    with pytest.raises(Mistake, match="validation gave loss, accuracy"):
        list(shoestring.train(job(metrics=accuracy, goal="max f1", steps=1)))
