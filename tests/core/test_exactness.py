"""One word for each level of exactness, everywhere; and the level that is asked for is the one that is planned for."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import shoestring
from shoestring.commands.main import run
from shoestring.core.costs.hardware import Hardware
from shoestring.core.costs.ledger import Ledger
from shoestring.core.errors import Mistake, OverBudget
from shoestring.core.exactness import Exactness
from shoestring.planning.plan import Outcome
from shoestring.runs.reports.plan_summary import PlanSummary, read_summary
from shoestring.runs.reports.report import Report
from shoestring.runs.request import Request, differences
from shoestring.runs.resume import planning_options
from shoestring.show.page.sections.telling import plan as plan_section
from shoestring.training import library as api
from shoestring.training.commands.verify import show
from shoestring.training.execution.tasks import TrainResult
from shoestring.training.execution.verification import TrainedWeights, verdict
from shoestring.training.memory.accumulate import Accumulate
from shoestring.training.memory.allocator import Allocator
from shoestring.training.memory.optimizers.fused import FusedOptimizer
from shoestring.training.planning.plan import load_plan, training_plan
from shoestring.training.planning.planner import Planner
from shoestring.training.report.outcome_text import training_outcome_text
from shoestring.training.technique import TrainingTechnique as Technique
from tests.models import Chain, job, rows
from tests.waiting import HUNG

pytestmark = pytest.mark.usefixtures("warm_workers")

PAPER = Hardware(described=True, memory=1 << 40, base=0)  # where the predicted process follows from the tensors alone


def wide(dropout: float) -> Any:
    """A chain whose activations are most of its memory."""
    inputs, targets = rows()
    return replace(
        job("chain"), model=lambda: Chain(dropout), data=lambda: [(inputs.repeat(64, 1), targets.repeat(64))] * 4
    )


@cache
def measured(dropout: float) -> tuple[Planner, Ledger, int]:
    """A planner, its ledger, and the bytes of the plan with FusedOptimizer alone."""
    made = Planner(wide(dropout), PAPER, catalogue=(Accumulate, FusedOptimizer))
    ledger = made.ledger()
    return made, ledger, made.outcome_of(ledger, None, (FusedOptimizer(),)).chosen.predicted["process_bytes"]


def planned(
    share: float, exact: str | None = None, dropout: float = 0.2, forced: tuple[Technique, ...] | None = None
) -> Outcome:
    """What is planned for a share of the bytes that FusedOptimizer alone needs."""
    made, ledger, needs = measured(dropout)
    made.exact = exact
    return made.outcome_of(ledger, int(share * needs), forced)


def test_what_is_to_rounding_is_taken_where_it_fits_and_the_first_line_says_same_distribution_where_not() -> None:
    enough, little = planned(1.0), planned(0.5)
    assert enough.chosen.exactness <= Exactness.ROUNDING and not any(
        isinstance(one, Accumulate) for one in enough.chosen.techniques
    )
    assert ("Accumulate", "same distribution for this model: --exact distribution allows it") in enough.refused
    assert little.chosen.exactness is Exactness.DISTRIBUTION and isinstance(little.chosen.techniques[0], Accumulate)
    assert training_outcome_text(little).splitlines()[0].endswith(f", same distribution: {little.chosen}")
    assert training_outcome_text(enough).splitlines()[0].endswith(f", {enough.chosen.exactness.word}: {enough.chosen}")


def test_the_level_that_is_asked_for_is_the_least_that_is_planned_and_the_refusal_says_what_a_further_one_buys() -> (
    None
):
    assert planned(100.0, "bits").chosen.techniques == ()
    assert planned(0.5, "distribution").chosen.exactness is Exactness.DISTRIBUTION
    for exact in ("bits", "rounding"):
        with pytest.raises(
            OverBudget,
            match=r"; --exact distribution \(same distribution\) allows Accumulate.*; --inexact allows what is changed",
        ):
            planned(0.5, exact)
    with pytest.raises(OverBudget, match=r"--exact rounding \(to rounding\) allows Accumulate"):
        planned(0.5, "bits", dropout=0.0)


def test_techniques_that_the_user_wrote_are_held_to_the_level_that_the_user_asked_for() -> None:
    with pytest.raises(
        Mistake,
        match=r"Accumulate\(pieces=2\) is of the same distribution for this job .*--exact rounding allows to rounding",
    ):
        planned(1.0, "rounding", forced=(Accumulate(2),))
    assert planned(1.0, forced=(Accumulate(2),)).chosen.exactness is Exactness.DISTRIBUTION
    with pytest.raises(Mistake, match='exact="bits" asks for same bits and inexact=True allows changed'):
        shoestring.plan(wide(0.0), exact="bits", inexact=True)
    with pytest.raises(Mistake, match="exact='bytes': there are bits, rounding, distribution"):
        shoestring.plan(wide(0.0), exact="bytes")


def test_a_group_can_not_have_the_same_bits_and_says_why() -> None:
    with pytest.raises(
        Mistake, match="2 workers add up in another order than one: what a group trains is to rounding at best"
    ):
        shoestring.plan(wide(0.0), devices=2, exact="bits")


def test_a_group_that_would_change_what_is_trained_is_refused_with_the_reason() -> None:
    with pytest.raises(
        Mistake, match=r"2 workers .* \(batch norm looks at all samples .*\) to what is changed.*--inexact"
    ):
        Planner(job("u-net"), PAPER, devices=2).outcome(None)
    dropping = Planner(job("dropout chain"), PAPER, devices=2).outcome(None)
    assert dropping.chosen.exactness is dropping.plain.exactness is Exactness.DISTRIBUTION


def test_fit_plans_for_the_level_that_is_asked_for() -> None:
    model, batch = Chain(), rows()
    fitted = shoestring.fit(
        model, lambda output, given: torch.nn.functional.cross_entropy(output, given[1]), [batch] * 2, exact="bits"
    )
    assert fitted.outcome.chosen.exactness is Exactness.BITS


@pytest.mark.parametrize("level", Exactness)
def test_a_plan_carries_its_level_to_json_page_and_back(level: Exactness, tmp_path: Path) -> None:
    plan = training_plan((FusedOptimizer(),), level)
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").exactness is level and plan.as_json()["exactness"] == level.word
    assert f"{level.word.capitalize()}: {level.meaning}." in plan_section(Report(plan=PlanSummary((), exactness=level)))


@pytest.mark.parametrize("level", Exactness)
def test_terminal_page_and_verify_say_the_same_words_of_a_plan(
    level: Exactness, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = Outcome(training_plan((FusedOptimizer(),), level), training_plan())
    terminal, page = training_outcome_text(outcome), plan_section(Report(plan=read_summary(outcome.as_json())))
    figures = {"peak_bytes": 1, "process_bytes": 1, "step_seconds": 1.0}
    show(
        {
            "exactness": level.word,
            "verdicts": [verdict("FusedOptimizer()", level, found(1.0, 2.0), found(1.0, 2.0))],
            "losses": [],
            "predicted": figures,
            "measured": figures,
        },
        5,
    )
    for text in (terminal, page.replace(level.word.capitalize(), level.word), capsys.readouterr().out):
        assert f"{level.word}: {level.meaning}" in text
        assert not [other for other in Exactness if other is not level and other.meaning in text]


def test_fused_states_what_is_measured_of_it() -> None:
    equal, most = api.verify(job("chain"), (FusedOptimizer(),), 5)
    assert not equal and 0 < most < 1e-4 and FusedOptimizer().exactness(Ledger(())) is Exactness.ROUNDING


def test_a_run_is_compared_by_the_level_that_it_was_asked_for() -> None:
    none, bits, draws, inexact = (
        Request(job="a.py", **given) for given in ({}, {"exact": "bits"}, {"exact": "distribution"}, {"inexact": True})
    )  # type: ignore[arg-type]
    assert differences(bits, none) == [] and differences(bits, draws) == [
        "--exact changed: bits before, now distribution"
    ]
    assert differences(none, bits) == ["--exact changed: not given before, now bits"]
    assert planning_options(inexact, bits) == inexact and planning_options(bits, inexact) == bits, (
        "one takes the other back"
    )
    assert planning_options(none, bits) == bits and planning_options(none, inexact) == inexact


def test_a_saved_plan_is_held_to_the_level_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training_plan((FusedOptimizer(),), Exactness.ROUNDING).save(tmp_path / "plan.json")
    for command in ("plan", "verify"):
        assert run([command, "digits", "--plan", str(tmp_path / "plan.json"), "--exact", "bits"]) == 2
        said = capsys.readouterr().err
        assert "FusedOptimizer() is to rounding for this job" in said and "--exact bits allows same bits" in said
    assert run(["plan", "digits", "--exact", "bits", "--inexact"]) == 2
    assert "--exact bits asks for same bits and --inexact allows changed: give one of them" in capsys.readouterr().err


# verify


def found(weights: float, loss: float) -> TrainedWeights:
    return TrainedWeights(TrainResult(losses=(loss,)), {"w": torch.tensor([weights])})


@pytest.mark.parametrize(
    ("level", "weights", "loss", "kept"),
    [
        (Exactness.BITS, 1.0, 2.0, True),
        (Exactness.BITS, 1.0 + 1e-6, 2.0, False),
        (Exactness.ROUNDING, 1.0 + 1e-6, 2.0 + 1e-5, True),
        (Exactness.ROUNDING, 1.0, 2.0 + 1e-3, False),
        (Exactness.DISTRIBUTION, 5.0, 5.0, None),
        (Exactness.CHANGED, 5.0, 5.0, None),
    ],
)
def test_a_verdict_is_about_what_was_stated(level: Exactness, weights: float, loss: float, kept: bool | None) -> None:
    told = verdict("X()", level, found(1.0, 2.0), found(weights, loss))
    assert told["kept"] is kept and told["stated"] == level.word


@pytest.mark.parametrize(
    ("kept", "code", "word"), [(True, 0, "kept"), (False, 1, "NOT KEPT"), (None, 0, "not checked")]
)
def test_verify_ends_with_1_when_a_statement_is_not_kept(
    kept: bool | None,
    code: int,
    word: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    figures = {"peak_bytes": 1, "process_bytes": 1, "step_seconds": 1.0}
    verdict = {
        "technique": "FusedOptimizer()",
        "bit_equal": False,
        "largest_difference": 0.5,
        "loss_difference": 0.5,
        "stated": "to rounding",
        "kept": kept,
    }
    monkeypatch.setattr(
        "shoestring.training.execution.verification.verify_plan",
        lambda *given: {
            "kept": kept is not False,
            "verdicts": [verdict],
            "predicted": figures,
            "measured": figures,
            "losses": [(1.0, 1.5)],
        },
    )
    training_plan((FusedOptimizer(),), Exactness.ROUNDING).save(tmp_path / "plan.json")
    words = ["verify", "digits", "--plan", str(tmp_path / "plan.json")]
    assert run(words) == code and word in capsys.readouterr().out
    assert run([*words, "--json"]) == code and json.loads(capsys.readouterr().out)["kept"] is (kept is not False)


UNSEEDED = """
import os
import torch
from torch import nn
from shoestring import Job

class Net(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        with torch.no_grad():   # a model that does not follow from the job's seed: no two trainings of it are alike
            self.weight.copy_(torch.tensor([[byte / 255 for byte in os.urandom(8)] for _ in range(8)]))

def job() -> Job:
    return Job(model=Net, data=lambda: [(torch.ones(4, 8), torch.ones(4, 8))] * 8,
               loss=lambda output, batch: nn.functional.mse_loss(output, batch[1]), steps=3)
"""


@pytest.mark.slow
def test_verify_says_of_a_model_that_trains_otherwise_every_time_that_the_statement_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(UNSEEDED)
    training_plan((Allocator("huge"),)).save(tmp_path / "plan.json")
    done = subprocess.run(
        [sys.executable, "-m", "shoestring", "verify", "job.py", "--plan", "plan.json", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HUNG,
    )
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert not report["kept"] and [one["kept"] for one in report["verdicts"]] == [False]
