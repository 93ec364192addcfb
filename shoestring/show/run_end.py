"""How commands report a run that is finished, or that the same command continues: page, JSON and a few lines."""

from __future__ import annotations

import sys
from contextlib import contextmanager

from shoestring.core.command_line.exit_codes import DONE, FAULT, STOPPED
from shoestring.core.errors import Mistake
from shoestring.show.output import say, screen, warn, write_page

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path
    from typing import Any

    from shoestring.core.command_line.command import Call
    from shoestring.runs.options import RunOptions
    from shoestring.runs.reports.report import Report
    from shoestring.runs.resume import OpenedRun
    from shoestring.runs.session import Session


def session_of(held: OpenedRun) -> Session:
    """The session of a command; write failures are reported as warnings."""
    from shoestring.runs.session import Session
    from shoestring.show.page import page

    return Session(held, page, lambda text: warn([text]))


def report_unfinished(call: Call, asked: RunOptions, session: Session, said: str, unsaved: str) -> int:
    """Report a run that the same command continues."""
    from shoestring.runs.reports.report import report_of

    if unsaved:
        print(f"shoestring: {unsaved}", file=sys.stderr)
        return FAULT
    told = report_of(session.folder.path)
    say(call, f"{said}; the same command{'' if asked.run else f' with --run {told.path}'} goes on from there")
    warn(told.damage)
    return STOPPED


def report_finished(
    call: Call,
    asked: RunOptions,
    report: Mapping[str, Any],
    session: Session,
    shown: Callable[[Mapping[str, Any], Path], None] | None = None,
) -> int:
    """Report a finished run; `shown` prints it (default: as `train` does)."""
    import json
    from pathlib import Path

    from shoestring.core.files.codec import finite_json
    from shoestring.runs.reports.report import report_of

    run = session.folder.path
    told = report_of(run)
    warn(told.damage)
    if asked.report:
        write_page(Path(asked.report), session.draw(told), asked=True)
    if call.json:
        print(json.dumps(finite_json(dict(report))))
        return DONE
    with check_report(run):
        place = Path(asked.report or run / "report.html")
        shown(report, place) if shown is not None else show(report, told, place)
    return DONE


@contextmanager
def check_report(run: Path) -> Iterator[None]:
    """While inside, an error from impossible content is reported as the fault of the run's report.json, which anybody
    may have written."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise Mistake(
            f"{run / 'report.json'} has impossible content ({type(error).__name__}: {str(error)[:120]}): remove it, and the same "
            f"command makes it again"
        ) from error


def show(report: Mapping[str, Any], told: Report, page: Path) -> None:
    from shoestring.core.figures import AS
    from shoestring.planning.quantities import compare_figures
    from shoestring.show.cut import model_cut
    from shoestring.show.terminal import beside
    from shoestring.show.timeline import cut_text

    print("", beside(compare_figures(report["predicted"], report["measured"]), screen(sys.stdout)), "", sep="\n")
    for one in report.get("workers", ()):  # the table above is about the largest worker
        known = (
            f"{figure.quantity.label} {figure.quantity.text(figure.measured)} "
            f"({figure.off_text}{'' if figure.off_text == AS else ' what was predicted'})"
            for figure in compare_figures(one["predicted"], one["measured"])
            if figure.off is not None
        )
        print(f"worker {one['rank']}: {', '.join(known) or 'nothing was predicted of it'}")
    if told.plan.cut is not None:
        print("", cut_text(model_cut(told.plan.cut, told.timed), screen(sys.stdout)), "", sep="\n")
    if report["shown"]:
        print(report["shown"], "", sep="\n")
    losses = [loss for loss in report["losses"] if loss is not None]
    if report.get("ended", "steps") != "steps":
        print(ended_text(report["ended"], report["steps"], report.get("epochs", 0), report.get("asked", {})))
    if report.get("best"):
        print(best_text(report["best"]))
    course = (
        f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {report['steps']} steps; " if losses else ""
    )  # its events may be lost
    print(f"{course}weights {report['weights_sha256'][:12]}")
    print(f"report: {page.resolve()}")


def ended_text(why: str, steps: int, epochs: int, asked: dict[str, int]) -> str:
    """Why a training ended, in a sentence; `asked`: the steps and epochs that the job requested, 0 if unset.

    >>> print(ended_text("data ended", 85, 0, {"steps": 120, "epochs": 0}))
    ended after 85 steps: the data ended (120 steps were asked for); give data that can be gone through again, or --epochs
    >>> print(ended_text("no better for 3 validations", 400, 2, {"steps": 0, "epochs": 10}))
    ended after 400 steps: no better for 3 validations (10 epochs were asked for)
    >>> print(ended_text("epochs", 1, 1, {"epochs": 1}))
    ended after 1 step: 1 epoch is done
    """
    done = f"ended after {steps} step{'s' * (steps != 1)}"
    wanted = " or ".join(
        f"{count} {name if count != 1 else name[:-1]}" for name in ("steps", "epochs") if (count := asked.get(name, 0))
    )
    were = f" ({wanted} {'was' if wanted.startswith('1 ') else 'were'} asked for)" if wanted else ""
    if why == "epochs":
        return f"{done}: {epochs} epoch{'s are' if epochs != 1 else ' is'} done"
    if why == "data ended":
        return f"{done}: the data ended{were}; give data that can be gone through again, or --epochs"
    return f"{done}: {why}{were}"


def best_text(best: dict[str, Any]) -> str:
    """The best validation in one line.

    >>> best_text({"step": 300, "epoch": 2, "loss": 0.31, "accuracy": 0.912})
    'best held out: loss 0.310, accuracy 0.912, after step 300 (epoch 2)'
    """
    from shoestring.show.terminal import number_text

    found = ", ".join(f"{name} {number_text(value)}" for name, value in best.items() if name not in ("step", "epoch"))
    return f"best held out: {found}, after step {best['step']}" + (
        f" (epoch {best['epoch']})" if best.get("epoch") else ""
    )
