"""shoestring federate: train or tune where the data lives. Updates leave a device, records never do."""

from __future__ import annotations

import os
import sys

from shoestring.core.exit_codes import DONE, NOT_KEPT
from shoestring.show.output import say, screen
from shoestring.show.run_end import reported, unfinished
from shoestring.show.ticker import ticking

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from shoestring.core.command import Call
    from shoestring.core.job import Job
    from shoestring.federated.options import FederateCommand, FederateOptions
    from shoestring.runs.session import Session

ROOM = "shoestring.federated.session"
LOOKING = "looking at the clients and at how fast devices work …"


def run(command: FederateCommand, call: Call) -> int:
    from shoestring.federated.options import FederateOptions
    from shoestring.federated.task_command import check_task, run_task
    from shoestring.training.commands.job_flags import AskedJob, JobLoader, asked_job, loaded

    check_task(command)
    asked = FederateOptions.parsed(vars(command.asked))
    training = command.tasks.task == "train"
    if training:
        asked.check_private()
    given: AskedJob = asked_job(call, command.job, {} if command.seed is None else {"seed": command.seed})
    check_use(command.use or ())
    command.run.check()
    _ = command.run.cadence  # a mistake in it is told now
    if not training:
        return run_task(command, call, loaded(call, given.path, given.flags, ROOM), asked)
    if command.plan_only or command.verify:
        return without_folder(command, call, loaded(call, given.path, given.flags, ROOM), asked)
    from dataclasses import replace
    from pathlib import Path

    from shoestring.core.codec import to_json
    from shoestring.jobfile import usual_values
    from shoestring.runs.request import request_for
    from shoestring.runs.resume import new_folder, opened
    from shoestring.show.run_end import session_of

    request = request_for(given.path, given.flags, None, command.use, False, None)
    loader = JobLoader(call, given, command.run.run, ROOM)
    held = opened(
        Path(command.run.run) if command.run.run else new_folder(given.path.stem),
        replace(request, room="federated", asked=to_json(asked)),
        given.path.read_bytes(),
        command.run.fresh,
        command.run.adopt,
        usual_values(given.path),
        loader.resolve,
    )
    with session_of(held) as session:
        report = session.finished()
        if report is not None:
            say(call, f"{session.folder.path} is finished; --fresh federates it anew")
            return reported(call, command.run, report, session, shown)
        return session.run(lambda: federated(command, call, loader.job(session.request.flags), session))


def check_use(use: tuple[str, ...]) -> None:
    """Tell of a misspelt technique before torch is imported."""
    from importlib.metadata import entry_points

    from shoestring.core.technique_syntax import call_of
    from shoestring.federated.plugin import TECHNIQUES
    from shoestring.planning.names import check_written

    for written in use:
        if call_of(written)[0] not in entry_points(group=TECHNIQUES).names:  # that an installed package brings
            check_written(written, "shoestring.federated")


def without_folder(command: FederateCommand, call: Call, job: Job, asked: FederateOptions) -> int:
    """The plan alone, or a few rounds of it beside the plain ones."""
    import json

    from shoestring.core.codec import finite_json
    from shoestring.federated.command_text import outcome_text, verdict_text
    from shoestring.federated.session import chosen
    from shoestring.federated.verify import verify_plan

    say(call, LOOKING)
    outcome = chosen(job, asked, command.use)
    if not command.verify:
        print(json.dumps(finite_json(outcome.as_json())) if call.json else outcome_text(outcome, screen(sys.stdout)))
        if outcome.chosen.doubt:  # a run says it itself
            say(call, f"warning: {outcome.chosen.doubt}")
        return DONE
    found = verify_plan(outcome.given, outcome.chosen)
    print(json.dumps(finite_json(found.as_json())) if call.json else verdict_text(found, screen(sys.stdout)))
    return DONE if found.kept else NOT_KEPT


def federated(command: FederateCommand, call: Call, job: Job, session: Session) -> int:
    """Federate in a folder that this process holds."""
    from shoestring.federated.command_text import RoundShower, outcome_text
    from shoestring.federated.session import begun, finish
    from shoestring.show.moving_line import MovingLine

    line = MovingLine()
    say(call, LOOKING)
    with ticking("looking at the clients"):  # over before devices are simulated by processes, which are forked
        federation = begun(job, session.held, adopt=command.run.adopt)
    if federation.outcome is not None:
        say(call, outcome_text(federation.outcome, screen(sys.stderr)))
    shower = RoundShower(call, line, federation.given.rounds, federation.given.asked.epsilon)
    try:
        with shower.ticker.running(not line.moves):
            ended = federation.run(shower, command.run.cadence, shower.heard)
    finally:
        line.end()
    if ended.unsaved or ended.stopped:
        return unfinished(call, command.run, session.write_page(), ended.stopped, ended.unsaved)
    return reported(call, command.run, finish(session, ended), session, shown)


def shown(report: dict[str, Any], page: Path) -> None:
    from shoestring.federated.command_text import report_text

    print(report_text(report, screen(sys.stdout)))
    print(f"report: {os.path.abspath(page)}")
