"""shoestring federate: train or tune where the data lives. Updates leave a device, records never do."""

from __future__ import annotations

import os
import sys

from shoestring.commands import DONE, FAULT, NOT_KEPT, STOPPED
from shoestring.commands.output import say, screen, warn, write_page
from shoestring.commands.ticker import ticking
from shoestring.core.errors import Mistake

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from typing import Any

    from shoestring.core.job import Job
    from shoestring.federated.runner import Ended
    from shoestring.federated.session import FederatedSession
    from shoestring.runs.folder import Folder
    from shoestring.runs.resume import OpenedRun

name = "federate"
help = "train or tune where the data lives: updates leave, records never do"
WHOLE = ("clients", "per_round", "rounds", "processes", "every")  # flags that are whole numbers
ROOM = "shoestring.federated.session"
LOOKING = "looking at the clients and at how fast devices work …"


def flags(parser: ArgumentParser) -> None:
    parser.epilog = (
        "The job's own arguments are flags too: name the job before --help to see them. Built-in jobs with clients: digits, "
        "authors"
    )
    parser.set_defaults(job_words=[], own_flags=[], given=set(), steps=None, epochs=None)
    parser.add_argument(
        "job", help="a Python file with `def job(...) -> Job(clients=...)`, or the name of a built-in job"
    )
    parser.add_argument(
        "--clients", metavar="N", help="devices that there are (default: as the job says; of a partition rule, 100)"
    )
    parser.add_argument("--per-round", metavar="N", help="devices that take part in a round (default 10)")
    parser.add_argument("--rounds", metavar="N", help="rounds (default 20)")
    parser.add_argument("--seed", metavar="N", help="what every random number follows from, instead of the job's")
    parser.add_argument("--upload", metavar="BYTES", help="most bytes that a device sends in a round, such as 200KB")
    parser.add_argument("--download", metavar="BYTES", help="most bytes that a device is given in a round")
    parser.add_argument("--time", metavar="TIME", help="most time for all rounds, such as 10m")
    parser.add_argument("--epsilon", metavar="E", help="most privacy loss of all rounds; noise is calibrated to it")
    parser.add_argument(
        "--delta", metavar="D", help="the chance at which the privacy loss may be greater, such as 1e-6"
    )
    parser.add_argument(
        "--statistics",
        metavar="RULE",
        help="running statistics of norm layers: averaged, local or frozen (default: as "
        "the job's Local says, else averaged, with --epsilon frozen)",
    )
    parser.add_argument(
        "--ledger",
        metavar="FILE",
        help="the privacy ledger of these people, for all runs on them (default: one in the run's folder)",
    )
    parser.add_argument(
        "--ledger-epsilon", metavar="E", help="most privacy loss of all runs on the ledger together; it is kept there"
    )
    parser.add_argument(
        "--insecure-seed", metavar="N", help="for tests: noise follows from this number, so NOTHING IS PRIVATE"
    )
    parser.add_argument(
        "--use",
        action="append",
        metavar="TECHNIQUE",
        help='exactly these techniques instead of choosing, such as "FedAdam(lr=0.01)"; may be repeated',
    )
    parser.add_argument("--every", metavar="N", help="judge the model every so many rounds (default: ten times in all)")
    parser.add_argument(
        "--processes", metavar="N", help="processes that simulate devices (default: one a core); the result is the same"
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
    from shoestring.federated.options import check_private, checked

    check_task(options)
    wanted = checked(wanted_of(options))
    if options.task == "train":
        check_private(wanted)
    path, job_flags = checked_job(options)
    if (options.fresh or options.adopt) and not options.run:
        raise Mistake("--fresh and --adopt are about a run that is there: name it with --run")
    if options.fresh and options.adopt:
        raise Mistake("--fresh begins anew, --adopt goes on: give one of them")
    from shoestring.commands.job_flags import JobLoader, loaded
    from shoestring.commands.train import cadence_of

    cadence_of(options)  # a mistake in it is told now
    if options.task != "train":
        return run_task(options, loaded(options, path, job_flags, ROOM), wanted)
    if options.plan_only or options.verify:
        return without_folder(options, loaded(options, path, job_flags, ROOM), wanted)
    from dataclasses import replace
    from pathlib import Path

    from shoestring.commands.train import kept_report
    from shoestring.jobfile import usual_values
    from shoestring.runs.request import request_for
    from shoestring.runs.resume import new_folder, opened

    asked = replace(request_for(path, job_flags, None, options.use, False, None), room="federated", asked=wanted)
    loader = JobLoader(options, path, job_flags, ROOM)
    held = opened(
        Path(options.run) if options.run else new_folder(path.stem),
        asked,
        path.read_bytes(),
        options.fresh,
        options.adopt,
        usual_values(path),
        loader.resolve,
    )
    try:
        report = {} if held.changed else kept_report(held.folder)
        if report:
            say(options, f"{held.folder.path} is finished; --fresh federates it anew")
            return reported(options, report, held.folder)
        return noted(options, loader.job(held.request.flags), held)
    finally:
        held.lock.release()


def wanted_of(options: Namespace) -> dict[str, Any]:
    """What the flags of a federation say; None where nothing is said."""
    for flag in WHOLE:
        written = vars(options)[flag]
        if written is not None and not (str(written).isdecimal() and int(written)):
            raise Mistake(f"--{flag.replace('_', '-')} {written}: give a whole number, 1 or more")
    wholes = {flag: None if vars(options)[flag] is None else int(vars(options)[flag]) for flag in WHOLE}
    return wholes | {
        flag: vars(options)[flag]
        for flag in (
            "upload",
            "download",
            "time",
            "epsilon",
            "delta",
            "statistics",
            "ledger",
            "ledger_epsilon",
            "insecure_seed",
        )
    }


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


def without_folder(options: Namespace, job: Job, wanted: dict[str, Any]) -> int:
    """The plan alone, or a few rounds of it beside the plain ones."""
    import json

    from shoestring.commands.federate_text import outcome_text, verdict_text
    from shoestring.core.codec import finite_json
    from shoestring.federated.session import chosen
    from shoestring.federated.verify import verified

    say(options, LOOKING)
    outcome = chosen(job, wanted, options.use)
    if not options.verify:
        print(json.dumps(finite_json(outcome.as_json())) if options.json else outcome_text(outcome, screen(sys.stdout)))
        return DONE
    found = verified(outcome.given, outcome.chosen)
    print(json.dumps(finite_json(found.as_json())) if options.json else verdict_text(found, screen(sys.stdout)))
    return DONE if found.kept else NOT_KEPT


def noted(options: Namespace, job: Job, held: OpenedRun) -> int:
    """Federate; what ends it early is noted among the run's events. A mistake before the first round leaves no run."""
    from shoestring.runs.event import Failed, Stopped
    from shoestring.runs.events import note
    from shoestring.runs.resume import came_to_nothing, forget_attempt

    try:
        return federated(options, job, held)
    except (Exception, KeyboardInterrupt) as error:
        stopped = isinstance(error, KeyboardInterrupt)
        if came_to_nothing(error, held.folder.path):
            forget_attempt(held.folder.path)
            raise
        note(
            held.folder.path,
            Stopped(text="stopped at once; what was not saved is lost") if stopped else Failed(str(error)),
        )
        raise


def federated(options: Namespace, job: Job, held: OpenedRun) -> int:
    from shoestring.commands.federate_text import RoundShower, outcome_text
    from shoestring.commands.moving_line import MovingLine
    from shoestring.commands.train import cadence_of
    from shoestring.federated.session import begun

    cadence, line = cadence_of(options), MovingLine()
    say(options, LOOKING)
    with ticking("looking at the clients"):  # over before devices are simulated by processes, which are forked
        session = begun(job, held)
    if session.outcome is not None:
        say(options, outcome_text(session.outcome, screen(sys.stderr)))
    shower = RoundShower(options, line, session.given.rounds, session.given.asked.epsilon)
    try:
        with shower.ticker.running(not line.moves):
            ended = session.run(shower, cadence, shower.heard)
    finally:
        line.end()
    return finished(options, session, ended)


def finished(options: Namespace, session: FederatedSession, ended: Ended) -> int:
    from shoestring.runs.report import report_of
    from shoestring.show.page import page

    folder = session.held.folder
    if not ended.unsaved and not ended.stopped:
        return reported(options, session.report(ended), folder)
    write_page(folder.path / "report.html", page(report_of(folder.path).as_json()))
    if ended.unsaved:
        print(f"shoestring: {ended.unsaved}", file=sys.stderr)
        return FAULT
    say(
        options,
        f"{ended.stopped}; the same command{'' if options.run else f' with --run {folder.path}'} goes on from there",
    )
    return STOPPED


def reported(options: Namespace, report: dict[str, Any], folder: Folder) -> int:
    import json
    from pathlib import Path

    from shoestring.commands.federate_text import report_text
    from shoestring.runs.report import report_of
    from shoestring.show.page import page

    told = report_of(folder.path)
    warn(told.damage)
    drawn = page(told.as_json())
    write_page(folder.path / "report.html", drawn)
    if options.report:
        write_page(Path(options.report), drawn, asked=True)
    if options.json:
        print(json.dumps(report))
    else:
        print(report_text(report, screen(sys.stdout)))
        print(f"report: {os.path.abspath(options.report or folder.path / 'report.html')}")
    return DONE
