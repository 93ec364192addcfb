"""shoestring federate: train or tune where the data lives. Updates leave a device, records never do."""

from __future__ import annotations

import os
import sys

from shoestring.commands import DONE, NOT_KEPT
from shoestring.commands.output import say, screen
from shoestring.commands.report import reported, unfinished
from shoestring.commands.ticker import ticking
from shoestring.core.errors import Mistake

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from pathlib import Path
    from typing import Any

    from shoestring.core.job import Job
    from shoestring.federated.options import FederateOptions
    from shoestring.runs.cadence import Cadence
    from shoestring.runs.session import Session

name = "federate"
help = "train or tune where the data lives: updates leave, records never do"
ROOM = "shoestring.federated.session"
LOOKING = "looking at the clients and at how fast devices work …"


def flags(parser: ArgumentParser) -> None:
    from shoestring.core.arguments import add_flags
    from shoestring.federated.options import FederateOptions

    parser.epilog = (
        "The job's own arguments are flags too: name the job before --help to see them. Built-in jobs with clients: digits, "
        "authors"
    )
    parser.set_defaults(job_words=[], own_flags=[], given=set(), steps=None, epochs=None)
    parser.add_argument(
        "job", help="a Python file with `def job(...) -> Job(clients=...)`, or the name of a built-in job"
    )
    add_flags(parser, FederateOptions)
    parser.add_argument("--seed", metavar="N", help="what every random number follows from, instead of the job's")
    parser.add_argument(
        "--use",
        action="append",
        metavar="TECHNIQUE",
        help='exactly these techniques instead of choosing, such as "FedAdam(lr=0.01)"; may be repeated',
    )
    parser.add_argument("--plan-only", action="store_true", help="choose and explain, and end")
    parser.add_argument(
        "--verify", action="store_true", help="play a few rounds beside the plain sequential round: the same weights?"
    )
    parser.add_argument(
        "--run", metavar="DIR", help="folder of the run; one that is there is resumed (default: runs/JOB-TIME)"
    )
    parser.add_argument("--fresh", action="store_true", help="begin anew in --run; what is there is kept aside")
    parser.add_argument(
        "--adopt", action="store_true", help="go on with what is in --run although what is asked for changed"
    )
    parser.add_argument(
        "--save-every",
        metavar="N",
        default="1m",
        help="save every so many rounds (50) or so often (90s, 5m, 1h) (default 1m)",
    )
    parser.add_argument("--keep", type=int, default=3, metavar="K", help="checkpoints to keep (default 3)")
    parser.add_argument("--report", metavar="FILE", help="where to write the report page as well")
    from shoestring.commands.federate_task import task_flags

    task_flags(parser)


def run(options: Namespace) -> int:
    from shoestring.commands.federate_task import check_task, run_task
    from shoestring.core.arguments import written_by
    from shoestring.federated.options import FederateOptions
    from shoestring.runs.cadence import cadence_of

    check_task(options)
    asked = FederateOptions.parsed(written_by(FederateOptions, options))
    if options.task == "train":
        asked.check_private()
    path, job_flags = checked_job(options)
    if (options.fresh or options.adopt) and not options.run:
        raise Mistake("--fresh and --adopt are about a run that is there: name it with --run")
    if options.fresh and options.adopt:
        raise Mistake("--fresh begins anew, --adopt goes on: give one of them")
    from shoestring.commands.job_flags import JobLoader, loaded

    cadence = cadence_of(options.save_every, options.keep)  # a mistake in it is told now
    if options.task != "train":
        return run_task(options, loaded(options, path, job_flags, ROOM), asked)
    if options.plan_only or options.verify:
        return without_folder(options, loaded(options, path, job_flags, ROOM), asked)
    from dataclasses import replace
    from pathlib import Path

    from shoestring.commands.report import session_of
    from shoestring.core.codec import to_json
    from shoestring.jobfile import usual_values
    from shoestring.runs.request import request_for
    from shoestring.runs.resume import new_folder, opened

    request = request_for(path, job_flags, None, options.use, False, None)
    loader = JobLoader(options, path, job_flags, ROOM)
    held = opened(
        Path(options.run) if options.run else new_folder(path.stem),
        replace(request, room="federated", asked=to_json(asked)),
        path.read_bytes(),
        options.fresh,
        options.adopt,
        usual_values(path),
        loader.resolve,
    )
    with session_of(held) as session:
        report = session.finished()
        if report is not None:
            say(options, f"{session.folder.path} is finished; --fresh federates it anew")
            return reported(options, report, session, shown)
        return session.run(lambda: federated(options, loader.job(session.request.flags), session, cadence))


def checked_job(options: Namespace) -> tuple[Any, dict[str, Any]]:
    """The job's file and its flags; a misspelt technique is told before torch is imported."""
    from pathlib import Path

    from shoestring.commands.job_flags import course_words, refuse_ambiguous
    from shoestring.core.technique_syntax import call_of
    from shoestring.jobfile import job_path, parsed_flags
    from shoestring.planning.names import check_written

    file = job_path(options.job)
    found = parsed_flags(file, options.job_words + course_words(options), options.own_flags)
    refuse_ambiguous(options, file)
    for written in options.use or ():
        if not brought(call_of(written)[0]):
            check_written(written, "shoestring.federated")
    return Path(file), found


def brought(technique: str) -> bool:
    """Whether an installed package brings a technique of this name."""
    from importlib.metadata import entry_points

    from shoestring.federated.plugin import TECHNIQUES

    return technique in entry_points(group=TECHNIQUES).names


def without_folder(options: Namespace, job: Job, asked: FederateOptions) -> int:
    """The plan alone, or a few rounds of it beside the plain ones."""
    import json

    from shoestring.commands.federate_text import outcome_text, verdict_text
    from shoestring.core.codec import finite_json
    from shoestring.federated.session import chosen
    from shoestring.federated.verify import verify_plan

    say(options, LOOKING)
    outcome = chosen(job, asked, options.use)
    if not options.verify:
        print(json.dumps(finite_json(outcome.as_json())) if options.json else outcome_text(outcome, screen(sys.stdout)))
        return DONE
    found = verify_plan(outcome.given, outcome.chosen)
    print(json.dumps(finite_json(found.as_json())) if options.json else verdict_text(found, screen(sys.stdout)))
    return DONE if found.kept else NOT_KEPT


def federated(options: Namespace, job: Job, session: Session, cadence: Cadence) -> int:
    """Federate in a folder that this process holds."""
    from shoestring.commands.federate_text import RoundShower, outcome_text
    from shoestring.commands.moving_line import MovingLine
    from shoestring.federated.session import begun, finish

    line = MovingLine()
    say(options, LOOKING)
    with ticking("looking at the clients"):  # over before devices are simulated by processes, which are forked
        federation = begun(job, session.held, adopt=options.adopt)
    if federation.outcome is not None:
        say(options, outcome_text(federation.outcome, screen(sys.stderr)))
    shower = RoundShower(options, line, federation.given.rounds, federation.given.asked.epsilon)
    try:
        with shower.ticker.running(not line.moves):
            ended = federation.run(shower, cadence, shower.heard)
    finally:
        line.end()
    if ended.unsaved or ended.stopped:
        return unfinished(options, session.write_page(), ended.stopped, ended.unsaved)
    return reported(options, finish(session, ended), session, shown)


def shown(report: dict[str, Any], page: Path) -> None:
    from shoestring.commands.federate_text import report_text

    print(report_text(report, screen(sys.stdout)))
    print(f"report: {os.path.abspath(page)}")
