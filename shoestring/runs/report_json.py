"""The report of a run as JSON, as `export --to json` writes it.

    name, run             of the folder
    job, flags, budget    what was asked for; budget has `memory`
    arguments             of the job: all of them, with their final values
    state                 planning, running, stopped, finished, data ended (before the steps that it wanted), failed (it said why) or
                          died (it said nothing)
    pid                   who trains there now, or None
    text                  why it failed, stopped or died, and where it stands
    step, steps           where it is, and where it wants to be
    losses, seconds       of the steps that count, from the first
    step_numbers          their numbers, where they are not 1, 2, 3 and so on: events may be lost
    rates, norms          learning rate and norm of the gradients of each of them, where they are told; None in a step that does not
    borders               [step, rounds of the data that are over after it], of every step that ended a round
    samples_process       [seconds since it was begun, bytes of the process]
    measured              figures by name, with the moment and the parts of the peak
    predicted, plain, techniques, blocks, runners_up, exactness, basis    of the plan (missing while it plans)
    mesh                  of a group: {"data": 2, "stage": 2, "tensor": 1}, how many workers stand along each axis
    cut, cut_blocks, schedule, pieces, cut_why     of a model that is cut: blocks of every chunk, in order (as many chunks as stages, or a
                          multiple of that), their names, by which schedule, in how many pieces of a batch, and why
    bubble                there: {"predicted", "measured"} share of a step in which workers wait; measured: the median of steps that were
                          not tracked, None while nothing is known
    timeline              there: {"predicted", "measured"} of every stage [[kind, piece, chunk, begin, end]] in seconds; measured of `step`,
                          the last one so far; one_clock: false where machines have no clock in common
    peaks                 there: bytes that the tensors of every worker needed, by rank
    metrics, best         of every validation [{step, epoch, loss, ...}], and the best of them or None
    epochs                rounds of the data that are over
    ended                 why training ended: "steps", "epochs", "data ended", "no better for 3 validations"; "" while it goes on
    checkpoints           [{step, bytes, seconds, time, kept}] as they were saved; kept: it is still on disk
    damage                what of the folder can't be used, and why; also among the events, as warnings
    events                all that happened beside steps, in order
    room                  whose run it is; under its name is what only its runs have
    begun, last, now      seconds since 1970: the first event, the last one, this moment

and at the end all that report.json says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoestring.core.codec import finite_json, to_json
from shoestring.runs.event import StageTimes
from shoestring.runs.events import record_of
from shoestring.runs.folder import Folder, Unusable
from shoestring.runs.history import metrics_of
from shoestring.runs.plan_summary import CutPlan
from shoestring.runs.report import Curves, Report


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
    """The report.json of a finished run; empty if it can't be used, which is among the report's damage."""
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


def best_json(report: Report) -> dict[str, Any] | None:
    return metrics_of([report.best])[0] if report.best else None


def measured_json(report: Report) -> dict[str, Any]:
    """Its figures, with what is told of the highest tensor peak."""
    peak = record_of(report.largest) if report.largest is not None else {}
    return {name: value for name, value in peak.items() if name not in ("event", "time")} | dict(report.measured)


def cut_json(mesh: Mapping[str, int], cut: CutPlan | None, timed: StageTimes | None) -> dict[str, Any]:
    """How workers stand and where the model is cut, as predicted and as measured so far. Of a group the mesh; the rest of a model that
    is cut."""
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
