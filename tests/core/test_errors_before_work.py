"""Values that can't work are told where they enter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import shoestring
from shoestring import Job, Mistake
from shoestring.core.technique import parse_technique
from shoestring.runs.options import RunOptions
from shoestring.training.catalogue import CATALOGUE


@pytest.mark.parametrize(
    "written",
    [
        "Checkpoint(every=1, groups=2)",
        "Accumulate(pieces=0)",
        "OffloadActivations(to='/no/such/place')",
        "Allocator(kind='fast')",
        "Precision(dtype='int4')",
        "Precision(dtype='fp16', weights='bf16')",
        "Checkpoint(schedule='(2,1)')",
        "Accumulate()",
        "__import__('os')",
        "Checkpoint(2)",
    ],
)
def test_a_technique_that_cannot_be_is_refused(written: str) -> None:
    with pytest.raises(Mistake):
        parse_technique(written, CATALOGUE)


def test_fit_wants_batches_that_can_be_gone_through_again() -> None:
    with pytest.raises(Mistake, match="iterator"):
        shoestring.fit(nn.Linear(2, 2), nn.functional.mse_loss, iter([torch.zeros(1, 2)]))


def test_fit_trains_the_model_in_place() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    before = model[0].weight.clone()
    x, y = torch.randn(16, 4), torch.randint(2, (16,))
    fitted = shoestring.fit(model, lambda output, batch: nn.functional.cross_entropy(output, batch[1]), [(x, y)] * 5)
    assert len(fitted.losses) == 5 and not torch.equal(before, model[0].weight)


def test_a_job_without_steps_or_loss_is_told() -> None:
    with pytest.raises(Mistake, match="steps=0"):
        Job(model=nn.Identity, data=list, steps=0)
    lonely = Job(model=lambda: nn.Linear(2, 2), data=lambda: [torch.zeros(3, 2)])
    with pytest.raises(Mistake, match="gives no loss"):
        list(shoestring.train(lonely))


def test_an_optimizer_that_evaluates_the_loss_itself_is_told() -> None:
    with pytest.raises(Mistake, match="LBFGS evaluates the loss itself"):
        shoestring.fit(
            nn.Linear(2, 2), lambda output, batch: output.sum(), [torch.zeros(1, 2)], optimizer=torch.optim.LBFGS
        )


def test_a_report_that_would_be_a_folder_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(Mistake, match=r"--report .* is a folder: give the name of a file"):
        RunOptions(report=str(tmp_path)).check()
    RunOptions(report=str(tmp_path / "report.html")).check()
