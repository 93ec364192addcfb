"""What `train` tells of a run that is finished."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoestring.core.workers.staging import RankFigures
from shoestring.runs.reports.report import Report
from shoestring.show.run_end import show
from shoestring.training.execution.final_report import by_worker
from shoestring.training.execution.tasks import TrainResult
from shoestring.training.planning.plan import TrainingDetails, training_plan

WORKERS = ({"peak_bytes": 90, "steps": 5, "sent": 50}, {"peak_bytes": 100, "steps": 5, "sent": 55})


def test_every_worker_stands_with_what_was_predicted_of_its_kind(capsys: pytest.CaptureFixture[str]) -> None:
    plan = training_plan(details=TrainingDetails(ranks=(RankFigures((0,), 90, 10.0), RankFigures((1,), 100, 10.0))))
    told = by_worker(plan, TrainResult(workers=WORKERS))
    assert told == [
        {
            "rank": 0,
            "predicted": {"peak_bytes": 90, "sent_bytes": 10.0},
            "measured": {"peak_bytes": 90, "sent_bytes": 10.0},
        },
        {
            "rank": 1,
            "predicted": {"peak_bytes": 100, "sent_bytes": 10.0},
            "measured": {"peak_bytes": 100, "sent_bytes": 11.0},
        },
    ]
    report: dict[str, Any] = {
        "predicted": {},
        "measured": {},
        "shown": "",
        "losses": [],
        "weights_sha256": "ab" * 32,
        "workers": told,
    }
    show(report, Report(Path("run")), Path("report.html"))
    assert (
        "worker 1: tensors 100 B (as predicted), sent, a step 11 B (10 % above what was predicted)"
        in capsys.readouterr().out
    )


def test_a_plan_that_says_nothing_of_workers_is_told_as_that() -> None:
    """Such as one that was saved by an earlier version."""
    assert [one["predicted"] for one in by_worker(training_plan(), TrainResult(workers=WORKERS))] == [{}, {}]
