"""shoestring federate: train or tune a model where the data are. Updates leave a device, records never do."""

from __future__ import annotations

import os
import sys
from functools import partial

from shoestring.core.command_line.exit_codes import DONE, NOT_KEPT
from shoestring.show.output import say, screen
from shoestring.show.run_end import report_finished, report_unfinished
from shoestring.show.ticker import ticking

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path
    from typing import Any

    from shoestring.core.command_line.command import Call
    from shoestring.core.job import Job
    from shoestring.federated.options import FederateCommand, FederateOptions
    from shoestring.federated.planning.prepare import Prepared
    from shoestring.federated.room import PlannedFederation
    from shoestring.runs.session import Session
    from shoestring.training.commands.job_flags import JobLoader

ROOM = "shoestring.federated.session"
LOOKING = "inspecting the clients and timing devices' work …"


def run(command: FederateCommand, call: Call) -> int:
    from shoestring.federated.commands.task_command import check_task, run_task
    from shoestring.federated.options import FederateOptions
    from shoestring.training.commands.job_flags import AskedJob, JobLoader, asked_job, load_job

    check_task(command)
    asked = FederateOptions.parsed(vars(command.asked))
    training = command.tasks.task == "train"
    if training:
        asked.check_private()
    given: AskedJob = asked_job(call, command.job, {} if command.seed is None else {"seed": command.seed})
    check_use(command.use or ())
    command.run.check()
    _ = command.run.cadence  # reports a mistake in it now
    if not training:
        return run_task(command, call, load_job(call, given.path, given.flags, ROOM), asked)
    if command.plan_only or command.verify:
        return without_folder(command, call, load_job(call, given.path, given.flags, ROOM), asked)
    from dataclasses import replace
    from pathlib import Path

    from shoestring.core.files.codec import to_json
    from shoestring.jobfile import usual_values
    from shoestring.runs.request import request_for
    from shoestring.runs.resume import new_folder, open_run
    from shoestring.show.run_end import session_of

    request = request_for(given.path, given.flags, None, command.use, False, None, room="federated")
    loader = JobLoader(call, given, command.run.run, ROOM)
    held = open_run(
        Path(command.run.run) if command.run.run else new_folder(given.path.stem),
        replace(request, asked=to_json(asked)),
        given.path.read_bytes(),
        command.run.fresh,
        command.run.adopt,
        usual_values(given.path),
        loader.resolve,
    )
    with session_of(held) as session:
        return run_federation(command, call, loader, session)


def check_use(use: tuple[str, ...]) -> None:
    """Report a misspelt technique before torch is imported."""
    from importlib.metadata import entry_points

    from shoestring.core.command_line.technique_syntax import call_of
    from shoestring.federated.plugin import TECHNIQUES
    from shoestring.planning.names import check_written

    for written in use:
        if call_of(written)[0] not in entry_points(group=TECHNIQUES).names:  # techniques of installed packages
            check_written(written, "shoestring.federated")


def without_folder(command: FederateCommand, call: Call, job: Job, asked: FederateOptions) -> int:
    """Show only the plan, or compare a few of its rounds with plain ones."""
    import json

    from shoestring.core.files.codec import finite_json
    from shoestring.federated.commands.command_text import federation_text, verdict_text
    from shoestring.federated.planning.verify import verify_plan
    from shoestring.federated.session import choose_plan

    say(call, LOOKING)
    outcome, given = choose_plan(job, asked, command.use)
    if not command.verify:
        print(
            json.dumps(finite_json(outcome.as_json()))
            if call.json
            else federation_text(outcome, given, screen(sys.stdout))
        )
        return DONE
    found = verify_plan(given, outcome.chosen)
    print(json.dumps(finite_json(found.as_json())) if call.json else verdict_text(found, screen(sys.stdout)))
    return DONE if found.holds else NOT_KEPT


def run_federation(command: FederateCommand, call: Call, loader: JobLoader, session: Session) -> int:
    """Run a federation in a folder that this process holds."""
    from contextlib import contextmanager

    from shoestring.federated.commands.command_text import RoundShower, federation_text
    from shoestring.federated.session import FederationRun, Onlooker
    from shoestring.show.moving_line import MovingLine

    def planning() -> AbstractContextManager[object]:
        say(call, LOOKING)
        return ticking("looking at the clients")  # finished before processes for simulated devices are forked

    def show(planned: PlannedFederation) -> None:
        say(call, federation_text(planned.outcome, planned.given, screen(sys.stderr)))

    @contextmanager
    def playing(given: Prepared) -> Iterator[Onlooker]:
        line = MovingLine()
        shower = RoundShower(call, line, given.rounds, given.asked.epsilon)
        try:
            with shower.ticker.running(not line.moves):
                yield Onlooker(shower, shower.on_progress)
        finally:
            line.end()

    make_job = partial(loader.job, session.request.flags)
    run = FederationRun(session, make_job, command.run.cadence, playing, planning, show, adopt=command.run.adopt)
    played = session.play(run)
    if played.report is None:
        assert played.ended is not None, "it ran"
        return report_unfinished(call, command.run, session, played.ended.stopped, played.ended.unsaved)
    if played.ended is None:
        say(call, f"{session.folder.path} is finished; --fresh federates it anew")
    return report_finished(call, command.run, played.report, session, print_report)


def print_report(report: Mapping[str, Any], page: Path) -> None:
    from shoestring.federated.commands.command_text import report_text

    print(report_text(report, screen(sys.stdout)))
    print(f"report: {os.path.abspath(page)}")
