"""The report of a finished training, as stored in its folder and printed by `train --json`."""

from __future__ import annotations

from typing import Any

from shoestring.core.exactness import Exactness
from shoestring.core.job import Job
from shoestring.core.technique import technique_json
from shoestring.core.workers.coordinates import coordinates
from shoestring.planning.quantities import MEASURABLE
from shoestring.runs.reports.report import Report
from shoestring.runs.reports.report_json import cut_json, finished_json
from shoestring.training.execution.tasks import TrainResult
from shoestring.training.planning.plan import TrainingPlan


def training_report(job: Job, chosen: TrainingPlan, told: Report, result: TrainResult) -> dict[str, Any]:
    predicted = {one.name: chosen.predicted[one.name] for one in MEASURABLE}
    report = finished_json(told, predicted, result.weights_sha256, result.shown) | {
        "steps": told.step,
        "techniques": [technique_json(one) | {"why": one.why} for one in chosen.techniques],
        "exact": chosen.exactness <= Exactness.ROUNDING,
        "basis": chosen.basis,
        "warnings": list(chosen.warnings),
        "epochs": told.epochs,
        "ended": told.why_ended,
        "asked": {"steps": job.steps, "epochs": job.epochs},
        "state_of_techniques": result.state,
        "world": result.world,
    }
    if result.restarts is not None:
        report |= cut_json(told.plan.mesh, told.plan.cut, told.timed)
        report |= {"restarts": result.restarts, "recovery_seconds": list(result.recovery_seconds)}
        report["sent_bytes"] = {"predicted": predicted["sent_bytes"], "measured": report["measured"].get("sent_bytes")}
        report["workers"] = by_worker(chosen, result)
    return report


def by_worker(chosen: TrainingPlan, result: TrainResult) -> list[dict[str, Any]]:
    """Per worker of a group: predicted memory and traffic, and what it measured since its last start."""
    predicted = {rank: kind for kind in chosen.details.ranks for rank in kind.ranks}
    return [
        {
            "rank": rank,
            **({"place": coordinates(sizes, rank)} if (sizes := chosen.details.mesh) else {}),
            "predicted": {"peak_bytes": kind.peak_bytes, "sent_bytes": kind.sent_bytes}
            if (kind := predicted.get(rank))
            else {},
            "measured": {"peak_bytes": one["peak_bytes"], "sent_bytes": one["sent"] / max(one["steps"], 1)},
        }
        for rank, one in enumerate(result.workers)
    ]
