"""The size of a process, where only trials show it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from shoestring.core.budget import Budget
from shoestring.core.costs.hardware import Hardware
from shoestring.core.costs.ledger import Ledger
from shoestring.core.job import Origin
from shoestring.data.lengths import Lengths
from shoestring.measure.tracker import Log
from shoestring.processes.task import Task
from shoestring.training.evidence.gather import Evidence
from shoestring.training.evidence.rehearsals import Rehearsals
from shoestring.training.evidence.tasks import TrialResult
from shoestring.training.memory.optimizers.fused import FusedOptimizer
from shoestring.training.planning.plan import ProcessBasis, TrainingDetails, training_plan
from shoestring.training.planning.predict_process import ProcessPredictor
from tests.models import job


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
    predictor = ProcessPredictor(
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


def test_where_sizes_vary_a_plan_without_a_rule_needs_room_for_how_far_two_runs_differ() -> None:
    plan = training_plan((), details=TrainingDetails(process_basis=ProcessBasis.TRIAL), process_bytes=900)
    rehearsals = Rehearsals(replace(job("chain"), origin=Origin("net.py")), Hardware(), lengths=Lengths(varies=True))
    predictor = ProcessPredictor(rehearsals, Evidence(Ledger(()), Log()))
    assert predictor.with_more_trials(plan, Budget(memory=1000)).predicted["process_bytes"] == 1035
    assert predictor.with_more_trials(plan, Budget(memory=1100)) == plan, "there is room for that"
    guessed = plan.with_details(process_basis=ProcessBasis.ESTIMATED)
    assert predictor.with_more_trials(guessed, Budget(memory=1000)) == guessed, "what is only estimated can't be tried"
