"""shoestring compress: a smaller or faster model, within a size, a latency and a quality floor at once."""

from __future__ import annotations

import os
import sys

from shoestring.commands import DONE
from shoestring.commands.output import say, screen, warn, write_page
from shoestring.commands.ticker import ticking
from shoestring.core.errors import Mistake, OverBudget

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from pathlib import Path
    from typing import Any

    from shoestring.compression.onnx.sized import OnnxFile
    from shoestring.compression.session import CompressOptions, CompressSession
    from shoestring.compression.source import ModelSource

name = "compress"
help = "a smaller or faster model: down to a size, a latency and a quality at once"
LOOKING = "looking at the model, and at what storing each weight otherwise would do to its answers …"


def flags(parser: ArgumentParser) -> None:
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
    parser.add_argument("--size", metavar="BYTES", help="most bytes on disk, such as 16MB")
    parser.add_argument(
        "--latency", metavar="TIME", help="most time for an answer to one sample, 99 of 100 times, such as 5ms"
    )
    parser.add_argument("--keep", metavar="SHARE", help="least fidelity to the original on unseen data, such as 0.998")
    parser.add_argument(
        "--metric", metavar="NAME>=VALUE", help="what a metric of the job must be, such as 'accuracy>=0.91'"
    )
    parser.add_argument(
        "--fidelity",
        default="auto",
        choices=["auto", "cosine", "kl", "binary", "r2"],
        help="how outputs are compared: cosine of vectors, exp(-KL) of softmax (kl) or sigmoid (binary), R^2; auto "
        "(default): what suits each, by what the job's loss does with it",
    )
    parser.add_argument(
        "--output",
        action="append",
        metavar="NAME",
        help="compare this output; may be repeated (default: all, and the worst leads)",
    )
    parser.add_argument("--axis", metavar="N", help="axis of an output's classes or vectors (default: found)")
    parser.add_argument(
        "--use",
        action="append",
        metavar="TECHNIQUE",
        help='exactly these techniques instead of choosing, such as "Quantize(bits=4)"; may be repeated',
    )
    parser.add_argument(
        "--heal", metavar="TIME", help="let the small model learn from the original for so long (10m), without labels"
    )
    parser.add_argument(
        "--to",
        choices=["onnx", "onnx-int8"],
        help="write an ONNX file for onnxruntime into the folder as well, which keeps --size too; "
        "onnx-int8: products of whole numbers, for speed",
    )
    parser.add_argument(
        "--newest", action="store_true", help="of a run: the newest weights, not those that were best in validation"
    )
    parser.add_argument(
        "--samples", metavar="N", default="1024", help="unseen samples that the report is measured on (default 1024)"
    )
    parser.add_argument("--out", metavar="DIR", help="folder to write (default: NAME-compressed)")
    parser.add_argument("--plan-only", action="store_true", help="choose and explain, and write nothing")


def run(options: Namespace) -> int:
    path, job_flags = checked_source(options)
    target = target_of(options)
    from shoestring.compression.source import open_source

    asked = asked_of(options)
    say(options, LOOKING)
    with ticking("looking at the model"):
        source = open_source(path, job_flags, best=not options.newest, job=options.job_of_run)
        warn(source.notes)
        session = session_of(options, source, asked)
    if options.heal is not None and not options.plan_only:
        from shoestring.api import train
        from shoestring.compression.healing import healed

        folder = target.with_name(f"{target.name}-healing")
        say(options, f"healing for {options.heal}; kept in {folder}, and the same command goes on with it")
        session = healed(session, options.heal, folder, train)
    return told(options, session, target)


def session_of(options: Namespace, source: ModelSource, asked: CompressOptions) -> CompressSession:
    """The plan; with --heal, the nearest one if only its fidelity falls short, because that is what healing mends."""
    from shoestring.compression.session import begun, nearest_session

    try:
        return begun(source, asked)
    except OverBudget as error:
        if options.heal is None or (found := nearest_session(source, asked, error)) is None:
            raise
        say(options, f"{error}; healing may mend that")
        return found


def checked_source(options: Namespace) -> tuple[str, dict[str, Any]]:
    """What is to be compressed, and flags of the job; what can be told before torch is imported is told now."""
    from shoestring.compression.weight_source import is_weights, job_needed
    from shoestring.jobfile import job_path, parsed_flags
    from shoestring.planning.names import COMPRESS, check_written

    for written in options.use or ():
        check_written(written, COMPRESS)
    if options.to:
        from shoestring.core.extras import require

        require("onnx")
    if not options.samples.isdecimal() or int(options.samples) < 2:
        raise Mistake(f"--samples {options.samples}: give a whole number, 2 or more")
    if not (options.size or options.latency or options.keep or options.metric or options.use):
        raise Mistake(
            "nothing says how small or how fast: give --size 16MB, --latency 5ms or --keep 0.998 (or techniques by --use)"
        )
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

    stem = Path(options.job).name.removesuffix(".py")
    target = Path(options.out or f"{stem}-compressed")
    if target.exists() and not options.plan_only:
        raise Mistake(f"{target} is there already: name another folder with --out, or remove it")
    return target


def asked_of(options: Namespace) -> CompressOptions:
    from shoestring.compression.calibration.metric import parse_floor
    from shoestring.compression.session import CompressOptions
    from shoestring.core.budget import Budget
    from shoestring.core.units import parse_seconds

    if options.heal is not None:
        parse_seconds(options.heal)
    budget = Budget.parsed(size=options.size, latency=options.latency, quality=options.keep)
    return CompressOptions(
        budget,
        parse_floor(options.metric) if options.metric else None,
        None if options.use is None else tuple(options.use),
        options.fidelity,
        int(options.samples),
        tuple(options.output or ()),
        axis_of(options.axis),
    )


def axis_of(written: str | None) -> int | None:
    try:
        return None if written is None else int(written)
    except ValueError:
        raise Mistake(f"--axis {written}: give the number of a dimension, such as 1 or -1") from None


def told(options: Namespace, session: CompressSession, target: Path) -> int:
    """Write what was chosen, measure it, and tell."""
    import json

    from shoestring.commands.compress_text import measured_text, plan_text

    if options.plan_only:
        print(json.dumps(session.plan.as_json()) if options.json else plan_text(session, screen(sys.stdout)))
        return DONE
    file, draft = None, target.with_name(f"{target.name}.onnx.draft-{os.getpid()}")
    if options.to:  # first: its size may ask for a smaller plan
        session, file = exported(options, session, draft)
    say(options, plan_text(session, screen(sys.stderr)))
    try:
        measured = session.packed(target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    report = session.report(measured, target)
    if file is not None:
        os.replace(draft, target / "model.onnx")
        report["onnx"] = file.as_json(target / "model.onnx")
        report["missed"] += file.missed(session)
    kept(target, report)
    if options.json:
        print(json.dumps(report))
    else:
        print(measured_text(session, measured, report, screen(sys.stdout)))
        print(
            f"written: {os.path.abspath(target)} (load it with {loading(session, target)}); report: "
            f"{os.path.abspath(target / 'report.html')}"
        )
    return missed(report["missed"])


def loading(session: CompressSession, target: Path) -> str:
    """How a user loads the folder that was written."""
    from shoestring.jobfile import BUILT_IN, job_path

    origin = session.source.job.origin
    job = "model=..." if origin is None else "" if origin.file in map(job_path, BUILT_IN) else f"job={origin.file!r}"
    return f"shoestring.load({str(target)!r}{', ' * bool(job)}{job})"


def missed(broken: list[str]) -> int:
    """The exit code: what was measured may miss what was asked for, which is told."""
    from shoestring.commands import OVER_BUDGET

    for text in broken:
        print(f"shoestring: {text}", file=sys.stderr)
    return OVER_BUDGET if broken else DONE


def exported(options: Namespace, session: CompressSession, draft: Path) -> tuple[CompressSession, OnnxFile]:
    from shoestring.compression.onnx.sized import onnx_file

    with ticking("writing the ONNX file"):
        smaller, file = onnx_file(session, draft, options.to == "onnx-int8")
    told = ["a smaller plan was taken, so that the ONNX file keeps --size"] if smaller.plan is not session.plan else []
    warn([*told, *file.made.notes])
    return smaller, file


def kept(target: Path, report: dict[str, Any]) -> None:
    from shoestring.compression.session import written_report
    from shoestring.core.files import write_whole
    from shoestring.show.page.compression import compression_page

    write_whole(target / "report.json", written_report(report))
    write_page(target / "report.html", compression_page(report))
