"""The report of a finished run, as stored in its folder and printed by `train --json`."""

from __future__ import annotations

from typing import Any

from shoestring.core.coordinates import coordinates
from shoestring.core.exactness import Exactness
from shoestring.core.job import Job
from shoestring.core.technique import technique_json
from shoestring.planning.quantities import MEASURABLE, compare_figures
from shoestring.runs.history import metrics_of
from shoestring.runs.report import Report
from shoestring.runs.report_json import best_json, cut_json, measured_json
from shoestring.runs.request import Request
from shoestring.training.execution.tasks import TrainResult
from shoestring.training.plan import TrainingPlan


def finished_report(
    job: Job, request: Request, chosen: TrainingPlan, told: Report, result: TrainResult
) -> dict[str, Any]:
    predicted = {one.name: chosen.predicted[one.name] for one in MEASURABLE}
    report: dict[str, Any] = {
        "run": str(told.path),
        "job": told.job,
        "flags": dict(request.flags),
        "arguments": dict(told.arguments),
        "steps": told.step,
        "losses": list(told.curves.losses),
        "budget": {"memory": request.memory},
        "predicted": predicted,
        "measured": measured_json(told),
        "off": {one.quantity.name: one.off for one in compare_figures(predicted, told.measured) if one.off is not None},
        "techniques": [technique_json(one) | {"why": one.why} for one in chosen.techniques],
        "weights_sha256": result.weights_sha256,
        "exactness": chosen.exactness.word,
        "exact": chosen.exactness <= Exactness.ROUNDING,
        "basis": chosen.basis,
        "warnings": list(chosen.warnings),
        "metrics": metrics_of(told.validated),
        "best": best_json(told),
        "epochs": told.epochs,
        "ended": told.why_ended,
        "asked": {"steps": job.steps, "epochs": job.epochs},
        "shown": result.shown,
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
