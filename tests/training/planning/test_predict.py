"""The process is its tensors and an overhead; what a plan does to the tensors must not change the overhead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoestring.core.budget import Budget
from shoestring.core.costs.hardware import Hardware
from shoestring.core.costs.ledger import Ledger
from shoestring.core.job import Origin
from shoestring.data.lengths import Lengths
from shoestring.measure.tracker import Log
from shoestring.processes.launch import run_worker
from shoestring.processes.standstill import NoAnswer, no_answer
from shoestring.processes.task import Task
from shoestring.training.evidence.gather import Evidence
from shoestring.training.evidence.plain_only import is_an_answer
from shoestring.training.evidence.rehearsals import Rehearsals
from shoestring.training.evidence.tasks import AnchorTask, TrialResult, TrialTask
from shoestring.training.memory.allocator import following
from shoestring.training.memory.optimizers.fused import FusedOptimizer
from shoestring.training.planning.plan import ProcessBasis, TrainingDetails, training_plan
from shoestring.training.planning.predict import Predictor
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


@pytest.mark.parametrize(
    ("sizes", "largest", "trials"),
    [
        ([950, 955], 980, 2),  # two more trials, both smaller than the first
        ([1000], 1020, 1),  # the second one shows that it may not fit
    ],
)
def test_a_plan_near_its_budget_is_tried_again_and_the_largest_trial_counts(
    sizes: list[int], largest: int, trials: int
) -> None:
    """Runs of one plan under glibc's allocator differ by some percent; one trial that came out small led to a run over its budget."""
    left = list(sizes)

    def worker(task: Task[Any], environment: Mapping[str, str]) -> Any:
        return TrialResult(left.pop(0), 1.0, 4)

    plan = training_plan(
        (FusedOptimizer(),), details=TrainingDetails(process_basis=ProcessBasis.TRIAL), process_bytes=980
    )
    predictor = Predictor(
        Rehearsals(replace(job("chain"), origin=Origin("net.py")), Hardware(), worker), Evidence(Ledger(()), Log())
    )
    assert (
        predictor.with_more_trials(plan, Budget(memory=1000)).predicted["process_bytes"] == largest
        and predictor.trials == trials
    )
    assert predictor.with_more_trials(plan, Budget(memory=2000)) == plan, "far below its budget nothing is tried"
    left, predictor.trials = [1000, 1000], 0
    plain = training_plan((), details=TrainingDetails(process_basis=ProcessBasis.ANCHOR), process_bytes=950)
    assert predictor.with_more_trials(plain, Budget(memory=1050)).predicted["process_bytes"] == 1020, (
        "a few steps do not tell of plain training, either"
    )


def test_a_silent_worker_is_told_with_what_it_was_to_do() -> None:
    def worker(task: Task[Any], environment: Mapping[str, str]) -> Any:
        raise no_answer(task, "net.py line 3")

    rehearsals = Rehearsals(replace(job("chain"), origin=Origin("net.py")), Hardware(), worker)
    told = "measuring a real step: no result came for 30 min, and the job stands in net.py line 3"
    with pytest.raises(NoAnswer, match=told) as error:
        rehearsals.ask_worker(TrialTask(file="net.py"), {}, "measuring a real step")
    assert is_an_answer(error.value), "plain steps would only stand still again"


def test_where_sizes_vary_a_plan_without_a_rule_needs_room_for_how_far_two_runs_differ() -> None:
    plan = training_plan((), details=TrainingDetails(process_basis=ProcessBasis.TRIAL), process_bytes=900)
    rehearsals = Rehearsals(replace(job("chain"), origin=Origin("net.py")), Hardware(), lengths=Lengths(varies=True))
    predictor = Predictor(rehearsals, Evidence(Ledger(()), Log()))
    assert predictor.with_more_trials(plan, Budget(memory=1000)).predicted["process_bytes"] == 1035
    assert predictor.with_more_trials(plan, Budget(memory=1100)) == plan, "there is room for that"
    guessed = plan.with_details(process_basis=ProcessBasis.ESTIMATED)
    assert predictor.with_more_trials(guessed, Budget(memory=1000)) == guessed, "what is only estimated can't be tried"
