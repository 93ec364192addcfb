"""Reports made by hand, from what `export --to json` would have written of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoestring.core.files.codec import from_json
from shoestring.runs.events.event import Event, Measured, Saved, Validated
from shoestring.runs.events.event_log import event_of
from shoestring.runs.reports.plan_summary import read_summary
from shoestring.runs.reports.report import Curves, Report, RunResult
from shoestring.runs.request import Request
from shoestring.training.report.page import TrainingReport


def made_report(told: Mapping[str, Any], of_room: Any = None) -> Report:
    """A report by the keys of its JSON (runs/reports/report_json); whatever is left out is not known."""
    measured = dict(told.get("measured", {}))
    parts = measured.pop("parts", None)
    saved = [Saved(**one, checkpoint=f"step-{one['step']}") for one in told.get("checkpoints", ())]
    return Report(
        path=Path(told.get("run", "")),
        request=Request(
            job=told.get("job", ""),
            arguments=told.get("flags", {}),
            memory=told.get("budget", {}).get("memory"),
            room=told.get("room", "training"),
        ),
        plan=read_summary({}, told),
        result=from_json(RunResult, told, unknown="ignored"),
        state=told.get("state", ""),
        text=told.get("text", ""),
        step=told.get("step", 0),
        steps=told.get("steps", 0),
        epochs=told.get("epochs", 0),
        why_ended=told.get("ended", ""),
        curves=curves(told),
        validated=[validated(one, told.get("best")) for one in told.get("metrics", ())],
        measured=measured,
        largest=Measured(measured.get("peak_bytes", 0), parts=parts) if parts else None,
        checkpoints=saved,
        kept=frozenset(one.checkpoint for one in saved),
        events=made_events(told.get("events", ())),
        begun=told.get("begun"),
        last=told.get("last"),
        now=told.get("now", 0.0),
        of_room=from_json(TrainingReport, told, unknown="ignored") if told.get("room") is None else of_room,
    )


def curves(told: Mapping[str, Any]) -> Curves:
    losses = told.get("losses", ())
    columns = {name: told[name] for name in ("seconds", "rates", "norms", "borders") if name in told}
    numbers = range(1, max([len(losses), *(len(one) for name, one in columns.items() if name != "borders")]) + 1)
    return Curves(numbers, losses, **columns, process=told.get("samples_process", ()))


def validated(one: Mapping[str, Any], best: Mapping[str, Any] | None) -> Validated:
    metrics = {name: value for name, value in one.items() if name not in ("step", "epoch")}
    return Validated(one["step"], one.get("epoch", 0), metrics, best=best is not None and best["step"] == one["step"])


def made_events(records: Any) -> list[Event]:
    found = [event_of({"time": 1.6e9, **one}) for one in records]
    return [one for one in found if one is not None]
