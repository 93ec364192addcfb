"""shoestring compress: a smaller or faster model, within a size, a latency and a quality floor at once."""

from __future__ import annotations

import os
import sys
from functools import partial

from shoestring.commands import DONE
from shoestring.commands.output import say, screen, warn
from shoestring.commands.ticker import ticking
from shoestring.core.errors import Mistake

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from pathlib import Path
    from typing import Any

    from shoestring.compression.arguments import CompressArguments
    from shoestring.compression.session import CompressSession
    from shoestring.compression.source import ModelSource

name = "compress"
help = "a smaller or faster model: down to a size, a latency and a quality at once"
LOOKING = "looking at the model, and at what storing each weight otherwise would do to its answers …"


def flags(parser: ArgumentParser) -> None:
    from shoestring.compression.arguments import CompressArguments
    from shoestring.core.arguments import add_flags

    parser.epilog = "The job's own arguments are flags too: name the job before --help to see them."
    parser.set_defaults(job_words=[], own_flags=[], given=set(), steps=None, epochs=None, seed=None)
    parser.add_argument(
        "job",
        metavar="RUN|JOB|WEIGHTS",
        help="folder of a run, whose best weights are taken; a job with weights; or weights with --job: a safetensors "
        "file, a state dict that torch.save wrote, or a Hugging Face folder",
    )
    parser.add_argument(
        "--job",
        dest="job_of_run",
        metavar="FILE",
        help="of a run, or of weights: the job that makes the model and its data, a file or a built-in one; no file that a "
        "run names is ever run",
    )
    add_flags(parser, CompressArguments)
    parser.add_argument(
        "--out", metavar="DIR", help="folder to write (default: NAME-compressed); one that was killed is gone on with"
    )
    parser.add_argument("--plan-only", action="store_true", help="choose and explain, and write nothing")


def run(options: Namespace) -> int:
    from shoestring.compression.arguments import CompressArguments
    from shoestring.core.arguments import written_by

    path, job_flags = checked_source(options)
    asked = CompressArguments(**written_by(CompressArguments, options))
    asked.check()
    target = target_of(options)
    from shoestring.compression.run import CompressRun, drawn, held_folder, options_of
    from shoestring.compression.source import open_source
    from shoestring.runs.session import Session

    options_of(asked, asked.use)  # a mistake in it is told now
    say(options, LOOKING)
    with ticking("looking at the model"):
        source = open_source(path, job_flags, best=not asked.newest, job=options.job_of_run)
        warn(source.notes)
        if options.plan_only:
            return planned_only(options, source, asked)
    with Session(held_folder(source, target, asked), drawn, lambda text: warn([text])) as session:
        report = session.finished()
        if report is not None:
            say(options, f"{target} is finished; --fresh compresses anew")
        else:
            work = CompressRun(
                session,
                source,
                asked,
                asked.use,
                partial(say, options),
                lambda text: warn([text]),
                partial(show_plan, options),
                ticking,
            )
            report = session.run(work.execute)
        return told(options, source, report, target)


def planned_only(options: Namespace, source: ModelSource, asked: CompressArguments) -> int:
    """Tell of the plan, and write nothing."""
    import json

    from shoestring.commands.compress_text import plan_text
    from shoestring.compression.run import options_of, plan

    found = plan(source, options_of(asked, asked.use), asked.heal, partial(say, options))
    print(json.dumps(found.plan.as_json()) if options.json else plan_text(found, screen(sys.stdout)))
    return DONE


def show_plan(options: Namespace, found: CompressSession) -> None:
    from shoestring.commands.compress_text import plan_text

    say(options, plan_text(found, screen(sys.stderr)))


def checked_source(options: Namespace) -> tuple[str, dict[str, Any]]:
    """What is to be compressed, and flags of the job; what can be told before torch is imported is told now."""
    from shoestring.compression.weight_source import is_weights, job_needed
    from shoestring.jobfile import job_path, parsed_flags
    from shoestring.planning.names import check_written

    for written in options.use or ():
        check_written(written, "shoestring.compression")
    if options.job.endswith(".onnx"):
        raise Mistake(
            f"{options.job} is an ONNX file, which has a graph and no module that could be calibrated or healed: give the run or "
            f"the weights that it was made from, with --to onnx-int8 for products of bytes"
        )
    if is_weights(options.job):
        if not options.job_of_run:
            raise job_needed(options.job, "--job FILE")
        return options.job, parsed_flags(job_path(options.job_of_run), options.job_words, options.own_flags)
    if os.path.isdir(options.job):
        if os.path.exists(os.path.join(options.job, "manifest.json")):
            raise Mistake(
                f"{options.job} is a compressed model: give the run, the job or the weights that it was made from"
            )
        if not os.path.exists(os.path.join(options.job, "run.json")):
            raise Mistake(
                f"{options.job} is a folder, and not a run of shoestring: give the folder that `shoestring train` named, or a "
                f"job file"
            )
        if options.job_of_run:
            return options.job, parsed_flags(job_path(options.job_of_run), options.job_words, options.own_flags)
        if options.job_words:
            raise Mistake(
                f"{options.job_words[0]!r} is no option of this command; flags of the run's job are given with --job FILE"
            )
        return options.job, {}
    if options.job_of_run:
        raise Mistake(f"--job makes the model of a run, and {options.job} is no folder of a run: leave --job out")
    return options.job, parsed_flags(job_path(options.job), options.job_words, options.own_flags)


def target_of(options: Namespace) -> Path:
    from pathlib import Path

    return Path(options.out or f"{Path(options.job).name.removesuffix('.py')}-compressed")


def told(options: Namespace, source: ModelSource, report: dict[str, Any], target: Path) -> int:
    """Tell of a model that was written and measured."""
    import json

    from shoestring.commands.compress_text import measured_text

    if options.json:
        print(json.dumps(report))
    else:
        print(measured_text(report, screen(sys.stdout)))
        print(
            f"written: {os.path.abspath(target)} (load it with {loading(source, target)}); report: "
            f"{os.path.abspath(target / 'report.html')}"
        )
    return missed(report["missed"])


def loading(source: ModelSource, target: Path) -> str:
    """How a user loads the folder that was written."""
    from shoestring.jobfile import BUILT_IN, job_path

    origin = source.job.origin
    job = "model=..." if origin is None else "" if origin.file in map(job_path, BUILT_IN) else f"job={origin.file!r}"
    return f"shoestring.load({str(target)!r}{', ' * bool(job)}{job})"


def missed(broken: list[str]) -> int:
    """The exit code: what was measured may miss what was asked for, which is told."""
    from shoestring.commands import OVER_BUDGET

    for text in broken:
        print(f"shoestring: {text}", file=sys.stderr)
    return OVER_BUDGET if broken else DONE
