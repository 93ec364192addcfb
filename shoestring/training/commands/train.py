"""shoestring train: run a plan in a folder, go on with it after whatever ended it, and show predicted beside measured."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from shoestring.core.errors import Mistake, OverBudget
from shoestring.core.exit_codes import DONE, STOPPED
from shoestring.show.moving_line import MovingLine
from shoestring.show.output import say
from shoestring.show.run_end import reported, session_of, unfinished
from shoestring.show.ticker import Ticker
from shoestring.training.commands.job_flags import AskedJob, JobLoader, asked_job
from shoestring.training.commands.progress import Shower
from shoestring.training.commands.run_plan import after_memory_ran_out, require_means, settled_plan

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path
    from typing import Any

    from shoestring.core.command import Call
    from shoestring.core.job import Job
    from shoestring.processes.group.rendezvous import Rendezvous
    from shoestring.processes.nodes import Team
    from shoestring.runs.event import Event
    from shoestring.runs.request import Request
    from shoestring.runs.session import Session
    from shoestring.training.execution.tasks import TrainResult, TrainTask
    from shoestring.training.options import TrainCommand
    from shoestring.training.plan import TrainingPlan


def run(asked: TrainCommand, call: Call) -> int:
    asked.check()
    return train_in_folder(asked, call, asked_job(call, asked.job, asked.course.given))


def train_in_folder(asked: TrainCommand, call: Call, given: AskedJob) -> int:
    """Train the job of a file with these flags, and keep the run."""
    _, workers = asked.run.cadence, asked.workers.team(os.environ)
    from pathlib import Path

    from shoestring.core.extras import require
    from shoestring.jobfile import usual_values
    from shoestring.runs.request import request_for
    from shoestring.runs.resume import new_folder, opened

    if asked.tensorboard:
        require("tensorboard")
    wanted = request_for(
        given.path,
        given.flags,
        asked.plan.budget,
        asked.plan.written,
        asked.plan.inexact,
        asked.plan.plan,
        asked.plan.exact,
    )
    if workers.nodes is not None and workers.nodes.rank:
        return followed(asked, call, given.path, wanted, workers)
    with rendezvous_of(workers) as rendezvous:
        loader = JobLoader(call, given, asked.run.run, silent=True)
        held = opened(
            Path(asked.run.run) if asked.run.run else new_folder(given.path.stem),
            wanted,
            given.path.read_bytes(),
            asked.run.fresh,
            asked.run.adopt,
            usual_values(given.path),
            loader.resolve,
        )
        with session_of(held) as session:
            report = None if asked.replan else session.finished()
            if report is not None:
                say(call, f"{session.folder.path} is finished; --fresh trains it anew")
                return reported(call, asked.run, report, session)
            return session.run(lambda: trained(asked, call, loader, session, workers, rendezvous))


def trained(
    asked: TrainCommand, call: Call, loader: JobLoader, session: Session, workers: Team, rendezvous: Rendezvous | None
) -> int:
    """Train in a folder that this process holds."""
    from shoestring.processes.messages import OutOfMemory
    from shoestring.runs.report import report_of
    from shoestring.training.evidence.tasks import Position, specs_of
    from shoestring.training.execution.batch_sizes import expected_batches
    from shoestring.training.execution.final_report import finished_report
    from shoestring.training.execution.recorder import RecordingSettings
    from shoestring.training.execution.tasks import TrainTask

    request, folder = session.request, session.folder
    job, path = loader.job(request.flags), loader.path
    chosen = settled_plan(asked, call, job, session.held)
    require_means(chosen, workers, folder.path)
    task = TrainTask(
        file=str(path),
        flags=request.flags,
        techniques=specs_of(chosen.techniques),
        recording=RecordingSettings(
            str(folder.path),
            asked.run.cadence,
            request.memory,
            int(chosen.predicted["process_bytes"]),
            str(path.parent),
        ),
        traceback=call.traceback,
        expected=expected_batches(chosen),
        position=Position(speeds=chosen.details.speeds),
    )
    try:
        result = worked(asked, call, task, job, chosen, session, workers, rendezvous)
    except OutOfMemory as error:
        raise OverBudget(after_memory_ran_out(call, workers, job, session.held, chosen, str(error)), chosen) from error
    if result.stopped is not None or result.unsaved:
        told = session.write_page()
        said = told.text if result.stopped else "Stopped before it trained a step"
        return unfinished(call, asked.run, told, said, result.unsaved)
    report = finished_report(job, request, chosen, report_of(folder.path), result)
    session.finish(report)
    return reported(call, asked.run, report, session)


def worked(
    asked: TrainCommand,
    call: Call,
    task: TrainTask,
    job: Job,
    chosen: TrainingPlan,
    session: Session,
    workers: Team,
    rendezvous: Rendezvous | None,
) -> TrainResult:
    """What the worker, or the group of them, gives back; what happens meanwhile is shown."""
    from shoestring.processes.launch import run_worker
    from shoestring.runs.tensorboard import Board
    from shoestring.training.execution.verification import worker_environment

    board = Board(session.folder.path) if asked.tensorboard else None
    line = MovingLine()
    ticker = Ticker(line.say)
    show = Shower(call, line, job, session.held, ticker)

    def on_event(event: Event) -> None:
        if board is not None:
            board.add(event)
        show(event)

    try:
        with ticker.running(not line.moves):
            if workers.world == 1:
                return run_worker(
                    task, worker_environment(chosen.techniques), on_event, session.held.lock.file, say_stopping
                )
            return grouped(task, session, workers, rendezvous, on_event)
    finally:
        line.end()
        if board is not None:
            board.close()


def say_stopping() -> None:
    """Written past Python's own stream, which may be in the middle of a line when the signal comes."""
    with suppress(OSError):
        os.write(sys.stderr.fileno(), b"\nstopping after this step, with a checkpoint; once more to stop at once\n")


def rendezvous_of(workers: Team) -> AbstractContextManager[Rendezvous | None]:
    """Where other machines come to, if there are some: open before the plan is made, so that they can wait for it."""
    if workers.nodes is None:
        from contextlib import nullcontext

        return nullcontext()
    from shoestring.processes.group.rendezvous import Rendezvous

    return Rendezvous(workers.nodes)


def grouped(
    task: TrainTask, session: Session, workers: Team, rendezvous: Rendezvous | None, on_event: Callable[[Event], None]
) -> TrainResult:
    """Train in a group of workers, here and on the machines that came to the rendezvous."""
    from dataclasses import replace

    from shoestring.processes.group.launch import run_group
    from shoestring.processes.group.round import Invitation
    from shoestring.processes.launch import fingerprint
    from shoestring.processes.task import written_task
    from shoestring.training.evidence.tasks import techniques_of
    from shoestring.training.execution.verification import worker_environment

    if rendezvous is not None:
        assert task.recording is not None, "the command trains in a folder"
        there = replace(task, recording=replace(task.recording, folder=str(session.folder.path.resolve())))
        rendezvous.invite(Invitation(written_task(there), session.request, fingerprint(task.file)))
    return run_group(
        task,
        worker_environment(techniques_of(task.techniques)),
        on_event,
        session.held.lock.file,
        workers.devices,
        rendezvous,
        workers.patience,
        workers.restarts,
        on_stop=say_stopping,
    )


def check_invited(asked: TrainCommand, path: Path, task: TrainTask, given: Mapping[str, Any]) -> None:
    """Refuse files that node 0 names and the user of this machine did not: by text of a flag or of a technique. The folder of the run is
    node 0's, whose address the user gave, unless --run says another."""
    from pathlib import Path

    from shoestring.training.commands.job_flags import check_flags
    from shoestring.training.evidence.tasks import techniques_of
    from shoestring.training.plan import check_paths

    assert task.recording is not None, "machines train together, in a folder"
    folder = task.recording.folder
    if task.weights or (asked.run.run and Path(asked.run.run).resolve() != Path(folder)):
        raise Mistake(
            f"node 0 trains in {folder!r}, and here --run is {asked.run.run!r}: give the same --run everywhere, a folder that all "
            f"machines see"
        )
    check_flags(folder, path, task.flags, given)
    check_paths(techniques_of(task.techniques), asked.plan.written or (), "node 0")


def followed(asked: TrainCommand, call: Call, path: Path, wanted: Request, workers: Team) -> int:
    """Train on a machine that does not lead: node 0 plans, keeps the run and tells of it."""
    from dataclasses import replace
    from pathlib import Path

    from shoestring.processes.group.launch import run_group
    from shoestring.processes.group.rendezvous import Rendezvous
    from shoestring.processes.task import read_task
    from shoestring.runs.request import differences
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
            devices=workers.devices,
            nodes=rendezvous,
            patience=workers.patience,
            restarts=workers.restarts,
            expected=given.fingerprint,
            on_stop=say_stopping,
        )
    return DONE if result.stopped is None else STOPPED
