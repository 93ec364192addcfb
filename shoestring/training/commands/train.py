"""shoestring train: execute a plan in a run folder, resume it after any interruption, and show predicted and measured
figures."""

from __future__ import annotations

import os

from shoestring.core.command_line.exit_codes import DONE, STOPPED
from shoestring.core.errors import Mistake
from shoestring.show.output import say
from shoestring.show.run_end import report_finished, report_unfinished, session_of
from shoestring.training.commands.job_flags import AskedJob, JobLoader, asked_job

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path
    from typing import Any

    from shoestring.core.command_line.command import Call
    from shoestring.processes.group.rendezvous import Rendezvous
    from shoestring.processes.nodes import Team
    from shoestring.runs.request import Request
    from shoestring.training.execution.tasks import TrainTask
    from shoestring.training.options import TrainCommand


def run(asked: TrainCommand, call: Call) -> int:
    asked.check()
    return train_in_folder(asked, call, asked_job(call, asked.job, asked.course.values))


def train_in_folder(asked: TrainCommand, call: Call, given: AskedJob) -> int:
    """Train the job of a file with these flags, in a run folder."""
    _, workers = asked.run.cadence, asked.workers.team(os.environ)
    from pathlib import Path

    from shoestring.core.command_line.extras import require
    from shoestring.jobfile import usual_values
    from shoestring.runs.reports.report import report_of
    from shoestring.runs.request import request_for
    from shoestring.runs.resume import new_folder, open_run
    from shoestring.training.commands.train_run import TrainRun

    if asked.tensorboard:
        require("tensorboard")
    wanted = request_for(
        given.path,
        given.flags,
        asked.plan.budget,
        asked.plan.use_texts,
        asked.plan.inexact,
        asked.plan.plan,
        asked.plan.exact,
        room="training",
    )
    if workers.nodes is not None and workers.nodes.rank:
        return follow_leader(asked, call, given.path, wanted, workers)
    with rendezvous_of(workers) as rendezvous:
        loader = JobLoader(call, given, asked.run.run, silent=True)
        held = open_run(
            Path(asked.run.run) if asked.run.run else new_folder(given.path.stem),
            wanted,
            given.path.read_bytes(),
            asked.run.fresh,
            asked.run.adopt,
            usual_values(given.path),
            loader.resolve,
        )
        with session_of(held) as session:
            played = session.play(TrainRun(asked, call, session, loader, workers, rendezvous), anew=asked.replan)
            if played.report is None:
                assert played.ended is not None, "it ran"
                said = (
                    report_of(session.folder.path).text if played.ended.stopped else "Stopped before it trained a step"
                )
                return report_unfinished(call, asked.run, session, said, played.ended.unsaved)
            if played.ended is None:
                say(call, f"{session.folder.path} is finished; --fresh trains it anew")
            return report_finished(call, asked.run, played.report, session)


def rendezvous_of(workers: Team) -> AbstractContextManager[Rendezvous | None]:
    """The rendezvous for other machines, if there are any; opened before planning, so that they can wait for the plan."""
    if workers.nodes is None:
        from contextlib import nullcontext

        return nullcontext()
    from shoestring.processes.group.rendezvous import Rendezvous

    return Rendezvous(workers.nodes)


def check_invited(asked: TrainCommand, path: Path, task: TrainTask, given: Mapping[str, Any]) -> None:
    """Refuse files that node 0 names in flags or techniques, unless this machine's user named them too. The run's
    folder is node 0's, whose address the user gave, unless --run gives another."""
    from pathlib import Path

    from shoestring.training.commands.job_flags import check_flags
    from shoestring.training.evidence.tasks import techniques_of
    from shoestring.training.planning.plan import check_paths

    assert task.recording is not None, "machines train together, in a folder"
    folder = task.recording.folder
    if task.weights or (asked.run.run and Path(asked.run.run).resolve() != Path(folder)):
        raise Mistake(
            f"node 0 trains in {folder!r}, and here --run is {asked.run.run!r}: give the same --run everywhere, a folder that all "
            f"machines see"
        )
    check_flags(folder, path, task.flags, given)
    check_paths(techniques_of(task.techniques), asked.plan.use_texts or (), "node 0")


def follow_leader(asked: TrainCommand, call: Call, path: Path, wanted: Request, workers: Team) -> int:
    """Train on a machine other than node 0: node 0 plans, stores the run and reports."""
    from dataclasses import replace
    from pathlib import Path

    from shoestring.processes.group.launch import run_group
    from shoestring.processes.group.rendezvous import Rendezvous
    from shoestring.processes.task import read_task
    from shoestring.runs.request import differences
    from shoestring.training.commands.train_run import say_stopping
    from shoestring.training.evidence.tasks import techniques_of
    from shoestring.training.execution.tasks import TrainTask
    from shoestring.training.execution.verification import worker_environment

    assert workers.nodes is not None, "a machine that does not lead is one of several"
    with Rendezvous(workers.nodes) as rendezvous:
        say(call, f"{workers.nodes}: waiting for node 0 to plan …")
        given = rendezvous.invitation()
        task, found = read_task(given.task), differences(given.request, wanted)
        assert isinstance(task, TrainTask) and task.recording is not None, "machines train together, in a folder"
        if found:
            raise Mistake(
                f"{workers.nodes} asks for something else than node 0: {'; '.join(found)}; give the same command everywhere"
            )
        check_invited(asked, path, task, wanted.flags)
        if not Path(task.recording.folder).is_dir():
            raise Mistake(
                f"{workers.nodes} does not see the folder of the run, {task.recording.folder}: put it where all machines see "
                f"it, under the same name, and say so with --run"
            )
        say(call, f"{workers.nodes}: training; node 0 tells how it goes")
        result = run_group(
            replace(task, file=str(path)),
            worker_environment(techniques_of(task.techniques)),
            workers,
            rendezvous=rendezvous,
            expected=given.fingerprint,
            on_stop=say_stopping,
        )
    return DONE if result.stopped is None else STOPPED
