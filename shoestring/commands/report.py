"""How `train` tells of a run that is finished, or that the same command goes on with: page, JSON and a few lines."""
from __future__ import annotations

import sys

from shoestring.commands import DONE, FAULT, STOPPED
from shoestring.commands.output import say, screen, warn, write_page

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Any

    from shoestring.planning.plan import Plan
    from shoestring.processes.tasks import TrainResult
    from shoestring.runs.report import Report
    from shoestring.runs.resume import Opened


def finished_report(job: str, held: Opened, chosen: Plan, told: Report, result: TrainResult) -> dict[str, Any]:
    """The report of a finished run, as its folder keeps it and --json prints it."""
    from shoestring.core.exactness import Exactness
    from shoestring.planning.outcome import plan_file
    from shoestring.planning.quantities import plan_summary

    plan = plan_summary(plan_file(chosen, {}))
    report: dict[str, Any] = {
        "run": str(held.folder.path), "job": job, "flags": dict(held.request.flags), "steps": told.step, "losses": list(told.losses),
        "budget": {"memory": held.request.memory}, "predicted": plan["predicted"],
        "measured": dict(told.measured), "techniques": plan["techniques"],
        "weights_sha256": result.weights_sha256, "exactness": chosen.exactness.word,
        "exact": chosen.exactness <= Exactness.ROUNDING, "sure": chosen.sure,
        "metrics": told.metrics, "best": told.best, "epochs": told.epochs, "ended": told.why_ended,
        "shown": result.shown, "state_of_techniques": result.state, "world": result.world,
    }
    if result.restarts is not None:
        report |= {"restarts": result.restarts, "recovery_seconds": list(result.recovery_seconds)}
        report["sent_bytes"] = {"predicted": plan["predicted"].get("sent_bytes"), "measured": report["measured"].get("sent_bytes")}
        report["workers"] = by_worker(chosen, result)
    return report


def by_worker(chosen: Plan, result: TrainResult) -> list[dict[str, Any]]:
    """What every worker of a group was predicted to need and send, beside what it measured since it was started last."""
    predicted = {rank: kind for kind in chosen.ranks for rank in kind.ranks}
    return [{
        "rank": rank,
        "predicted": {"peak_bytes": kind.peak_bytes, "sent_bytes": kind.sent_bytes} if (kind := predicted.get(rank)) else {},
        "measured": {"peak_bytes": one["peak_bytes"], "sent_bytes": one["sent"] / max(one["steps"], 1)},
    } for rank, one in enumerate(result.workers)]


def unfinished(options: Namespace, run: Path, told: Report, result: TrainResult) -> int:
    """Tell of a run that the same command goes on with."""
    from shoestring.show.page import page

    write_page(run / "report.html", page(told.as_json()))
    if result.unsaved:
        print(f"shoestring: {result.unsaved}", file=sys.stderr)
        return FAULT
    said = told.text if result.stopped else "stopped before it trained a step"
    say(options, f"{said}; the same command goes on from there")
    warn(told.damage)
    return STOPPED


def reported(options: Namespace, report: dict[str, Any], run: Path) -> int:
    """Write the page of a run that is finished and tell the user of it."""
    import json
    from pathlib import Path

    from shoestring.runs.report import report_of
    from shoestring.show.page import page

    told = report_of(run)
    warn(told.damage)
    write_page(run / "report.html", page(told.as_json()))
    if options.report:
        write_page(Path(options.report), page(told.as_json()), asked=True)
    if options.json:
        print(json.dumps(report))
    else:
        show(report, Path(options.report or run / "report.html"))
    return DONE


def show(report: dict[str, Any], page: Path) -> None:
    from shoestring.planning.quantities import compared
    from shoestring.show.terminal import beside

    print("", beside(compared(report["predicted"], report["measured"]), screen(sys.stdout)), "", sep="\n")
    for one in report.get("workers", ()):   # the table above is about the largest
        told = (f"{figure.quantity.label} {figure.quantity.text(figure.measured)} ({figure.off_text})"
                for figure in compared(one["predicted"], one["measured"]) if figure.off is not None)
        print(f"worker {one['rank']}: {', '.join(told) or 'nothing was predicted of it'}")
    if report["shown"]:
        print(report["shown"], "", sep="\n")
    losses = report["losses"]
    course = f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {report['steps']} steps; " if losses else ""   # its events may be lost
    print(f"{course}weights {report['weights_sha256'][:12]}")
    if best := report.get("best"):
        found = metrics_text({name: value for name, value in best.items() if name not in ("step", "epoch")})
        print(f"best in validation: step {best['step']}, {found} (shoestring export {report['run']} --to safetensors --best)")
    if report.get("ended", "steps") != "steps":
        print(f"ended: {report['ended']}")
    print(f"report: {page.resolve()}")


def metrics_text(metrics: Mapping[str, float | None]) -> str:
    """Metrics for people.

    >>> metrics_text({"loss": 0.25, "accuracy": None})
    'loss 0.25, accuracy not a number'
    """
    return ", ".join(f"{name} not a number" if value is None else f"{name} {value:.4g}" for name, value in metrics.items())
