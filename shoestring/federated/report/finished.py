"""The report of a finished federation, as stored in its folder and printed by `federate --json`."""

from __future__ import annotations

from typing import Any

from shoestring.core.files.codec import finite_json, to_json
from shoestring.federated.events import RoundFinished
from shoestring.federated.playing.fold import FederationReport
from shoestring.federated.runner import FederationResult
from shoestring.runs.events.event import Warned
from shoestring.runs.reports.report import Report
from shoestring.runs.reports.report_json import finished_json

MOST = 20  # most rejected updates that are listed one by one


def federation_report(told: Report, ended: FederationResult) -> dict[str, Any]:
    """Sums are over all rounds that count; `participants`, `missing` and `rejected` are lists with an entry per round."""
    found, rounds = told.of_room, told.of_kind(RoundFinished)
    assert isinstance(found, FederationReport), "the run's own request was read"
    columns = {name: [getattr(one, name) for one in rounds] for name in ("participants", "missing")}
    seconds = sum(told.curves.seconds)
    found_json: dict[str, Any] = finite_json(
        finished_json(told, told.plan.predicted, ended.weights_sha256, ended.shown)
        | {
            "steps": ended.rounds,
            "rounds": ended.rounds,
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
            "techniques": [to_json(one) for one in told.plan.techniques or ()],
            "warnings": [event.text for event in told.events if isinstance(event, Warned)],
            "ended": ended.why,
        }
    )
    return found_json
