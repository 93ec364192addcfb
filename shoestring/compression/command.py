"""shoestring compress: make a model smaller or faster, within limits on size, latency and quality."""

from __future__ import annotations

import os
import sys
from functools import partial

from shoestring.core.command_line.exit_codes import DONE
from shoestring.core.errors import Mistake
from shoestring.show.output import say, screen, warn
from shoestring.show.ticker import ticking

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Any

    from shoestring.compression.arguments import CompressArguments, CompressCommand
    from shoestring.compression.loading.source import ModelSource
    from shoestring.compression.session import CompressSession
    from shoestring.core.command_line.command import Call

LOOKING = "calibrating: measuring the damage of storing each weight in fewer bits …"


def run(command: CompressCommand, call: Call) -> int:
    path, job_flags = checked_source(command, call)
    asked = command.asked
    asked.check()
    target = target_of(command)
    from shoestring.compression.loading.source import open_source
    from shoestring.compression.run import CompressRun, check_source, draw_page, held_folder, options_of
    from shoestring.runs.session import Session

    options_of(asked, asked.use)  # reports a mistake in it now
    say(call, LOOKING)
    with ticking("looking at the model"):
        source = open_source(path, job_flags, best=not asked.newest, job=command.job_of_run)
        warn(source.notes)
        check_source(source, asked)
        if command.plan_only:
            return plan_only(call, source, asked)
    with Session(held_folder(source, target, asked), draw_page, lambda text: warn([text])) as session:
        played = session.play(
            CompressRun(
                session,
                source,
                asked,
                asked.use,
                partial(say, call),
                lambda text: warn([text]),
                partial(show_plan, call),
                ticking,
            )
        )
        if played.ended is None:
            say(call, f"{target} is finished; --fresh compresses anew")
        assert played.report is not None, "a compression that ends is finished"
        return report_written(call, source, played.report, target)


def plan_only(call: Call, source: ModelSource, asked: CompressArguments) -> int:
    """Print the plan and write nothing."""
    import json

    from shoestring.compression.command_text import plan_text
    from shoestring.compression.run import options_of, plan

    found = plan(source, options_of(asked, asked.use), asked.heal, partial(say, call))
    print(json.dumps(found.outcome.as_json()) if call.json else plan_text(found, screen(sys.stdout)))
    return DONE


def show_plan(call: Call, found: CompressSession) -> None:
    from shoestring.compression.command_text import plan_text

    say(call, plan_text(found, screen(sys.stderr)))


def checked_source(command: CompressCommand, call: Call) -> tuple[str, dict[str, Any]]:
    """The model to compress, and flags of its job; mistakes that need no torch are reported now."""
    from shoestring.compression.loading.weight_source import is_onnx, is_weights, job_needed
    from shoestring.jobfile import job_path, parse_flags
    from shoestring.planning.names import check_written

    for written in command.asked.use or ():
        check_written(written, "shoestring.compression")
    if is_weights(command.job) or is_onnx(command.job):
        if not command.job_of_run:
            raise job_needed(command.job, "--job FILE")
        return command.job, parse_flags(job_path(command.job_of_run), call.words, call.own_flags)
    if os.path.isdir(command.job):
        if os.path.exists(os.path.join(command.job, "manifest.json")):
            raise Mistake(
                f"{command.job} is a compressed model: give the run, the job or the weights that it was made from"
            )
        if not os.path.exists(os.path.join(command.job, "run.json")):
            raise Mistake(
                f"{command.job} is a folder, and not a run of shoestring: give the folder that `shoestring train` named, or a "
                f"job file"
            )
        if command.job_of_run:
            return command.job, parse_flags(job_path(command.job_of_run), call.words, call.own_flags)
        if call.words:
            raise Mistake(
                f"{call.words[0]!r} is no option of this command; flags of the run's job are given with --job FILE"
            )
        return command.job, {}
    if command.job_of_run:
        raise Mistake(f"--job makes the model of a run, and {command.job} is no folder of a run: leave --job out")
    return command.job, parse_flags(job_path(command.job), call.words, call.own_flags)


def target_of(command: CompressCommand) -> Path:
    from pathlib import Path

    return Path(command.out or f"{Path(command.job).name.removesuffix('.py')}-compressed")


def report_written(call: Call, source: ModelSource, report: Mapping[str, Any], target: Path) -> int:
    """Report a model that was written and measured."""
    import json

    from shoestring.compression.command_text import measured_text
    from shoestring.core.files.codec import finite_json
    from shoestring.show.run_end import check_report

    if call.json:
        print(json.dumps(finite_json(dict(report))))
    else:
        with check_report(target):  # it may be of a run that was finished long ago
            print(measured_text(report, screen(sys.stdout)))
        print(
            f"written: {os.path.abspath(target)} (load it with {loading(source, target)}); report: "
            f"{os.path.abspath(target / 'report.html')}"
        )
    with check_report(target):
        return exit_code(report["missed"])


def loading(source: ModelSource, target: Path) -> str:
    """How to load the folder that was written."""
    from shoestring.jobfile import BUILT_IN, job_path

    origin = source.job.origin
    if source.file is not None:
        return f"onnxruntime.InferenceSession({str(target / 'model.onnx')!r})"
    job = "model=..." if origin is None else "" if origin.file in map(job_path, BUILT_IN) else f"job={origin.file!r}"
    return f"shoestring.load({str(target)!r}{', ' * bool(job)}{job})"


def exit_code(broken: list[str]) -> int:
    """The exit code: the measured model may miss a requested limit, which is reported."""
    from shoestring.core.command_line.exit_codes import OVER_BUDGET

    for text in broken:
        print(f"shoestring: {text}", file=sys.stderr)
    return OVER_BUDGET if broken else DONE
