"""How `train` tells of a run that is finished, or that the same command goes on with: page, JSON and a few lines."""
from __future__ import annotations

import sys

from shoestring.commands import DONE, FAULT, STOPPED
from shoestring.commands.output import say, screen, warn, write_page

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from pathlib import Path
    from typing import Any

    from shoestring.planning.plan import Plan
    from shoestring.runs.resume import Opened


def report_of(job: str, held: Opened, chosen: Plan, told: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """The report of a finished run, as its folder keeps it and --json prints it."""
    from shoestring.commands.run_plan import plan_file

    plan = plan_file(chosen, {})
    report = {
        "run": str(held.folder.path), "job": job, "flags": held.asked["flags"], "steps": told["step"], "losses": told["losses"],
        "budget": {"memory": held.asked["memory"]}, "predicted": plan["predicted"],
        "measured": told.get("measured", {}), "techniques": plan["techniques"],
        "weights_sha256": result["weights_sha256"], "exactness": chosen.exactness.word, "sure": chosen.sure,
        "shown": result.get("shown", ""), "state_of_techniques": result["state"],
    } | {name: result[name] for name in ("world", "restarts", "recovery_seconds") if name in result}
    if "restarts" in result:
        report["sent_bytes"] = {"predicted": plan["predicted"].get("sent_bytes"), "measured": report["measured"].get("sent_bytes")}
    return report


def unfinished(options: Namespace, run: Path, told: dict[str, Any], result: dict[str, Any]) -> int:
    """Tell of a run that the same command goes on with."""
    from shoestring.show.page import page

    write_page(run / "report.html", page(told))
    if "unsaved" in result:
        print(f"shoestring: {result['unsaved']}", file=sys.stderr)
        return FAULT
    said = told["text"] if result["stopped"] else "stopped before it trained a step"
    say(options, f"{said}; the same command goes on from there")
    warn(told["damage"])
    return STOPPED


def reported(options: Namespace, report: dict[str, Any], run: Path) -> int:
    """Write the page of a run that is finished and tell the user of it."""
    import json
    from pathlib import Path

    from shoestring.runs.story import story
    from shoestring.show.page import page

    told = story(run)
    warn(told["damage"])
    write_page(run / "report.html", page(told))
    if options.report:
        write_page(Path(options.report), page(told), asked=True)
    if options.json:
        print(json.dumps(report))
    else:
        show(report, Path(options.report or run / "report.html"))
    return DONE


def show(report: dict[str, Any], page: Path) -> None:
    from shoestring.show.terminal import beside

    print("", beside(report["predicted"], report["measured"], screen(sys.stdout)), "", sep="\n")
    if report["shown"]:
        print(report["shown"], "", sep="\n")
    losses = report["losses"]
    course = f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {report['steps']} steps; " if losses else ""   # its events may be lost
    print(f"{course}weights {report['weights_sha256'][:12]}")
    print(f"report: {page.resolve()}")
