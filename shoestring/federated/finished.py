"""The report of a finished federation, as stored in its folder and printed by `federate --json`."""

from __future__ import annotations

from typing import Any

from shoestring.core.codec import finite_json, to_json
from shoestring.federated.events import RoundFinished
from shoestring.federated.fold import FederationReport
from shoestring.federated.quantities import FEDERATED
from shoestring.federated.runner import FederationResult
from shoestring.planning.quantities import compare_figures
from shoestring.runs.event import Warned
from shoestring.runs.history import metrics_of
from shoestring.runs.report import Report
from shoestring.runs.report_json import best_json, measured_json
from shoestring.runs.request import Request

MOST = 20  # most rejected updates that are listed one by one


def finished_report(request: Request, told: Report, ended: FederationResult) -> dict[str, Any]:
    """Sums are over all rounds that count; `participants`, `missing` and `rejected` are lists with an entry per round."""
    found, rounds = told.of_room, told.of_kind(RoundFinished)
    assert isinstance(found, FederationReport), "the run's own request was read"
    columns = {name: [getattr(one, name) for one in rounds] for name in ("participants", "missing")}
    predicted, seconds, plan = dict(told.plan.predicted), sum(told.curves.seconds), told.plan
    found_json: dict[str, Any] = finite_json(
        {
            "run": str(told.path),
            "job": told.job,
            "flags": dict(request.flags),
            "arguments": dict(told.arguments),
            "steps": ended.rounds,
            "rounds": ended.rounds,
            "losses": list(told.curves.losses),
            "metrics": metrics_of(told.validated),
            "best": best_json(told),
            "weights_sha256": ended.weights_sha256,
            "clients_per_second": sum(columns["participants"]) / seconds if seconds else None,
            "bytes_up": found.up,
            "bytes_down": found.down,
            "epsilon": rounds[-1].epsilon if rounds else None,
            "epsilon_in_all": rounds[-1].epsilon_in_all if rounds else None,
            "private": found.private,
            **columns,
            "rejected": [len(one.rejected) for one in rounds],
            "before": [{"round": one.step, **one.before} for one in rounds if one.before],
            "after": [{"round": one.step, **one.after} for one in rounds if one.after],
            "turned_away": [
                {"round": number, "name": name, "why": why} for number, name, why in found.rejections[-MOST:]
            ],
            "predicted": predicted,
            "measured": measured_json(told),
            "off": {
                one.quantity.name: one.off
                for one in compare_figures(predicted, told.measured, quantities=FEDERATED)
                if one.off is not None
            },
            "techniques": [to_json(one) for one in plan.techniques or ()],
            "exactness": told.exactness.word if told.exactness else None,
            "warnings": [event.text for event in told.events if isinstance(event, Warned)],
            "ended": ended.why,
            "shown": ended.shown,
            "budget": {"memory": None},
        }
    )
    return found_json
