"""shoestring train: run a plan in a folder, go on with it after whatever ended it, and show predicted beside measured."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from shoestring.commands import DONE, STOPPED
from shoestring.commands.job_flags import JobLoader, asked, job_flags, team, team_flags
from shoestring.commands.moving_line import MovingLine
from shoestring.commands.output import say
from shoestring.commands.progress import Shower
from shoestring.commands.report import reported, session_of, unfinished
from shoestring.commands.run_plan import after_memory_ran_out, require_means, settled_plan
from shoestring.commands.ticker import Ticker
from shoestring.core.errors import Mistake, OverBudget

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path
    from typing import Any

    from shoestring.core.job import Job
    from shoestring.processes.group.rendezvous import Rendezvous
    from shoestring.processes.nodes import Team
    from shoestring.runs.cadence import Cadence
    from shoestring.runs.event import Event
    from shoestring.runs.request import Request
    from shoestring.runs.session import Session
    from shoestring.training.execution.tasks import TrainResult, TrainTask
    from shoestring.training.plan import Plan

name = "train"
help = "run that plan and show predicted beside measured"


def flags(parser: ArgumentParser) -> None:
    job_flags(parser)
    team_flags(parser)
    parser.add_argument(
        "--run", metavar="DIR", help="folder of the run; one that is there is resumed (default: runs/JOB-TIME)"
    )
    parser.add_argument("--fresh", action="store_true", help="begin anew in --run; what is there is kept aside")
    parser.add_argument(
        "--adopt", action="store_true", help="go on with what is in --run although the job or plan changed"
    )
    parser.add_argument(
        "--replan", action="store_true", help="go on in --run with a plan made from what was measured there"
    )
    parser.add_argument(
        "--save-every",
        metavar="N",
        default="1m",
        help="save every so many steps (50) or so often (90s, 5m, 1h) (default 1m, and at most 3 %% of the time)",
    )
    parser.add_argument(
        "--keep", type=int, default=3, metavar="K", help="checkpoints to keep, beside the best one (default 3)"
    )
    parser.add_argument("--tensorboard", action="store_true", help="write event files for TensorBoard into the run")
    parser.add_argument("--report", metavar="FILE", help="where to write the report page as well")


def run(options: Namespace) -> int:
    given = asked(options)
    if (options.fresh or options.adopt or options.replan) and not options.run:
        raise Mistake("--fresh, --adopt and --replan are about a run that is there: name it with --run")
    if options.fresh and (options.adopt or options.replan):
        raise Mistake("--fresh begins anew, --adopt and --replan go on: give one of them")
    from shoestring.runs.cadence import cadence_of

    cadence, workers = cadence_of(options.save_every, options.keep), team(options)
    from pathlib import Path

    from shoestring.core.extras import require
    from shoestring.jobfile import usual_values
    from shoestring.runs.request import request_for
    from shoestring.runs.resume import new_folder, opened

    if options.tensorboard:
        require("tensorboard")
    wanted = request_for(
        given.path, given.flags, given.memory, options.use, options.inexact, options.plan, options.exact
    )
    if workers.nodes is not None and workers.nodes.rank:
        return followed(options, given.path, wanted, workers)
    with rendezvous_of(workers) as rendezvous:
        loader = JobLoader(options, given.path, given.flags)
        held = opened(
            Path(options.run) if options.run else new_folder(given.path.stem),
            wanted,
            given.path.read_bytes(),
            options.fresh,
            options.adopt,
            usual_values(given.path),
            loader.resolve,
        )
        with session_of(held) as session:
            report = None if options.replan else session.finished()
            if report is not None:
                say(options, f"{session.folder.path} is finished; --fresh trains it anew")
                return reported(options, report, session)
            return session.run(lambda: trained(options, loader, session, cadence, workers, rendezvous))


def trained(
    options: Namespace,
    loader: JobLoader,
    session: Session,
    cadence: Cadence,
    workers: Team,
    rendezvous: Rendezvous | None,
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
    chosen = settled_plan(options, job, session.held)
    require_means(chosen, workers, folder.path)
    task = TrainTask(
        file=str(path),
        flags=request.flags,
        techniques=specs_of(chosen.techniques),
        recording=RecordingSettings(str(folder.path), cadence, request.memory, chosen.process_bytes, str(path.parent)),
        traceback=options.traceback,
        expected=expected_batches(chosen),
        position=Position(speeds=chosen.speeds),
    )
    try:
        result = worked(options, task, job, chosen, session, workers, rendezvous)
    except OutOfMemory as error:
        raise OverBudget(after_memory_ran_out(options, job, session.held, chosen, str(error)), chosen) from error
    if result.stopped is not None or result.unsaved:
        told = session.write_page()
        said = told.text if result.stopped else "Stopped before it trained a step"
        return unfinished(options, told, said, result.unsaved)
    report = finished_report(job, request, chosen, report_of(folder.path), result)
    session.finish(report)
    return reported(options, report, session)


def worked(
    options: Namespace,
    task: TrainTask,
    job: Job,
    chosen: Plan,
    session: Session,
    workers: Team,
    rendezvous: Rendezvous | None,
) -> TrainResult:
    """What the worker, or the group of them, gives back; what happens meanwhile is shown."""
    from shoestring.processes.launch import run_worker
    from shoestring.runs.tensorboard import Board
    from shoestring.training.execution.verification import worker_environment

    board = Board(session.folder.path) if options.tensorboard else None
    line = MovingLine()
    ticker = Ticker(line.say)
    show = Shower(options, line, job, session.held, ticker)

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


def check_invited(options: Namespace, path: Path, task: TrainTask, given: Mapping[str, Any]) -> None:
    """Refuse files that node 0 names and the user of this machine did not: by text of a flag or of a technique. The folder of the run is
    node 0's, whose address the user gave, unless --run says another."""
    from pathlib import Path

    from shoestring.commands.job_flags import check_flags
    from shoestring.training.evidence.tasks import techniques_of
    from shoestring.training.plan import check_paths

    assert task.recording is not None, "machines train together, in a folder"
    folder = task.recording.folder
    if task.weights or (options.run and Path(options.run).resolve() != Path(folder)):
        raise Mistake(
            f"node 0 trains in {folder!r}, and here --run is {options.run!r}: give the same --run everywhere, a folder that all "
            f"machines see"
        )
    check_flags(folder, path, task.flags, given)
    check_paths(techniques_of(task.techniques), options.use or (), "node 0")


def followed(options: Namespace, path: Path, wanted: Request, workers: Team) -> int:
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
        say(options, f"{workers.nodes}: waiting for node 0 to plan …")
        given = rendezvous.invitation()
        task, found = read_task(given.task), differences(given.request, wanted)
        assert isinstance(task, TrainTask) and task.recording is not None, "machines train together, in a folder"
        if found:
            raise Mistake(
                f"{workers.nodes} asks for something else than node 0: {'; '.join(found)}; give the same command everywhere"
            )
        check_invited(options, path, task, wanted.flags)
        if not Path(task.recording.folder).is_dir():
            raise Mistake(
                f"{workers.nodes} does not see the folder of the run, {task.recording.folder}: put it where all machines see "
                f"it, under the same name, and say so with --run"
            )
        say(options, f"{workers.nodes}: training; node 0 tells how it goes")
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
