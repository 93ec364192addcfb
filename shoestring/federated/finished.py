"""The report of a federation that is over, as its folder keeps it and `federate --json` prints it."""

from __future__ import annotations

from typing import Any

from shoestring.core.codec import finite_json
from shoestring.federated.runner import Ended
from shoestring.planning.quantities import compared
from shoestring.runs.event import Warned
from shoestring.runs.federation import federation
from shoestring.runs.report import Report
from shoestring.runs.request import Request


def finished_report(request: Request, told: Report, ended: Ended) -> dict[str, Any]:
    """Its sums are over all rounds that count; `participants`, `missing` and `rejected` are lists with an entry a round."""
    found = federation(request.asked, told.rounds)
    predicted, seconds = dict(told.plan.get("predicted", {})), sum(told.seconds)
    found_json: dict[str, Any] = finite_json(
        {
            "run": told.run,
            "job": told.job,
            "flags": dict(request.flags),
            "arguments": dict(told.arguments),
            "steps": ended.rounds,
            "rounds": ended.rounds,
            "losses": list(told.losses),
            "metrics": told.metrics,
            "best": told.best,
            "weights_sha256": ended.weights_sha256,
            "clients_per_second": sum(found["participants"]) / seconds if seconds else None,
            "bytes_up": found["bytes_up"],
            "bytes_down": found["bytes_down"],
            "epsilon": found["epsilon"][-1] if found["epsilon"] else None,
            "epsilon_in_all": found["epsilon_in_all"][-1] if found["epsilon_in_all"] else None,
            "private": found["private"],
            "participants": found["participants"],
            "missing": found["missing"],
            "rejected": found["rejected"],
            "before": found["before"],
            "after": found["after"],
            "turned_away": found["turned_away"],
            "predicted": predicted,
            "measured": dict(told.measured),
            "off": {one.quantity.name: one.off for one in compared(predicted, told.measured) if one.off is not None},
            "techniques": told.plan.get("techniques", []),
            "exactness": told.exactness.word if told.exactness else None,
            "warnings": [event.text for event in told.events if isinstance(event, Warned)],
            "ended": ended.why,
            "shown": ended.shown,
            "budget": {"memory": None},
        }
    )
    return found_json
