"""The report of a run as JSON, as `export --to json` writes it.

    name, run             of the folder
    job, flags, budget    of the request; budget has `memory`
    arguments             of the job: all of them, with their final values
    state                 planning, running, stopped, finished, data ended (before the steps that it wanted), failed (it said why) or
                          died (it said nothing)
    pid                   who trains there now, or None
    text                  why it failed, stopped or died, and where it stands
    step, steps           where it is, and where it wants to be
    losses, seconds       of the steps that count, from the first
    step_numbers          their numbers, if not 1, 2, 3 and so on: events may be lost
    rates, norms          learning rate and gradient norm of each of them, if recorded; None where a step lacks it
    borders               [step, completed epochs], of every step that ended an epoch
    samples_process       [seconds since it was begun, bytes of the process]
    measured              figures by name, with the moment and the parts of the peak; `held_up`: fraction of the time that the steps
                          waited for a core, because of other processes
    predicted, plain, techniques, blocks, runners_up, exactness, basis    of the plan (missing while it plans)
    mesh                  of a group: number of workers along each axis, {"data": 2, "stage": 2, "tensor": 1}
    cut, cut_blocks       of a model cut across workers: number of blocks in every chunk, in order (as many chunks as stages, or a
                          multiple), and the names of the blocks
    schedule, pieces, cut_why     there: the schedule, micro-batches per batch, and the reason for the cut
    bubble                there: {"predicted", "measured"} fraction of a step in which workers wait; measured: the median of untracked
                          steps, None while unknown
    timeline              there: {"predicted", "measured"} of every stage [[kind, piece, chunk, begin, end]] in seconds; measured in
                          `step`, the last one so far; one_clock: false if workers are on several machines
    peaks                 there: peak tensor bytes of every worker, by rank
    metrics, best         of every validation [{step, epoch, loss, ...}], and the best of them or None
    epochs                completed epochs
    ended                 why training ended: "steps", "epochs", "data ended", "no better for 3 validations"; "" while it goes on
    checkpoints           [{step, bytes, seconds, time, kept}] as they were saved; kept: it is still on disk
    damage                files or lines that can't be used, and why; also among the events, as warnings
    events                all but the steps, in order
    room                  the room that the run belongs to; the room's own part stands under its name
    begun, last, now      seconds since 1970: the first event, the last one, this moment

followed by everything in report.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoestring.core.files.codec import finite_json, to_json
from shoestring.planning.quantities import compare_figures
from shoestring.runs.events.event import StageTimes
from shoestring.runs.events.event_log import record_of
from shoestring.runs.events.history import metrics_of
from shoestring.runs.folder import Folder, Unusable
from shoestring.runs.reports.plan_summary import CutPlan
from shoestring.runs.reports.report import Curves, Report


def report_json(report: Report) -> dict[str, Any]:
    request = report.request
    told = {
        "name": report.path.name,
        "run": str(report.path),
        "job": report.job,
        "flags": dict(request.flags) if request else {},
        "arguments": dict(report.arguments),
        "budget": {"memory": report.memory},
        "state": report.state,
        "pid": report.pid,
        "text": report.text,
        "step": report.step,
        "steps": report.steps,
        **curves_json(report.curves),
        "checkpoints": [record_of(one) | {"kept": one.checkpoint in report.kept} for one in report.checkpoints],
        "damage": list(report.damage),
        "metrics": metrics_of(report.validated),
        "best": best_json(report),
        "epochs": report.epochs,
        "ended": report.why_ended,
        "events": list(map(record_of, report.events)),
        "begun": report.begun,
        "last": report.last,
        "now": report.now,
    }
    if request is not None:
        told["room"] = request.room
    if report.of_room is not None:
        told[report.room] = finite_json(to_json(report.of_room))
    if report.measured:
        told["measured"] = measured_json(report)
    told |= report.plan.as_json() | cut_json(report.plan.mesh, report.plan.cut, report.timed)
    return told | (final_report(Folder(report.path)) if report.result else {}) | {"job": report.job}


def final_report(folder: Folder) -> dict[str, Any]:
    """The report.json of a finished run; empty if it is unusable, which the report lists as damage."""
    try:
        return folder.read("report.json")
    except Unusable:
        return {}


def curves_json(curves: Curves) -> dict[str, Any]:
    numbers = list(curves.numbers)
    told = {
        "losses": finite_json(list(curves.losses)),
        "seconds": list(curves.seconds),
        "samples_process": list(curves.process),
    }
    if numbers != list(range(1, len(numbers) + 1)):
        told["step_numbers"] = numbers
    several = {"rates": finite_json(list(curves.rates)), "norms": finite_json(list(curves.norms))}
    return told | {name: column for name, column in (several | {"borders": list(curves.borders)}).items() if column}


def finished_json(
    report: Report, predicted: Mapping[str, float | None], weights_sha256: str, shown: str
) -> dict[str, Any]:
    """What report.json says of a finished run in any room that trains; the room adds its own."""
    figures = compare_figures(predicted, report.measured, quantities=report.quantities)
    return {
        "run": str(report.path),
        "job": report.job,
        "flags": dict(report.request.flags) if report.request else {},
        "arguments": dict(report.arguments),
        "losses": list(report.curves.losses),
        "metrics": metrics_of(report.validated),
        "best": best_json(report),
        "weights_sha256": weights_sha256,
        "predicted": dict(predicted),
        "measured": measured_json(report),
        "off": {one.quantity.name: one.off for one in figures if one.off is not None},
        "exactness": report.exactness.word if report.exactness else None,
        "shown": shown,
        "budget": {"memory": report.memory},
    }


def best_json(report: Report) -> dict[str, Any] | None:
    return metrics_of([report.best])[0] if report.best else None


def measured_json(report: Report) -> dict[str, Any]:
    """Its figures, with the details of the highest tensor peak."""
    peak = record_of(report.largest) if report.largest is not None else {}
    return {name: value for name, value in peak.items() if name not in ("event", "time")} | dict(report.measured)


def cut_json(mesh: Mapping[str, int], cut: CutPlan | None, timed: StageTimes | None) -> dict[str, Any]:
    """The group's mesh and, for a model cut across workers, the cut with predicted and measured timelines."""
    if cut is None:
        return {"mesh": dict(mesh)} if mesh else {}
    one = cut.staging
    found: dict[str, Any] = {
        "mesh": dict(mesh),
        "cut": list(one.cut),
        "cut_blocks": [list(names) for names in one.blocks],
        "cut_why": one.why,
        "schedule": one.schedule,
        "pieces": one.pieces,
        "bubble": {"predicted": one.bubble, "measured": timed and timed.idle},
        "timeline": {"predicted": to_json(one.timeline), "measured": timed and to_json(timed.timeline)},
    }
    if timed is not None:
        found["timeline"] |= {"step": timed.step, "steps": timed.steps, "one_clock": not timed.machines}
        found["peaks"] = list(timed.peaks)
    return found
