"""The session of `shoestring train`: plan, train in one or several worker processes, report."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from shoestring.core.errors import OverBudget
from shoestring.core.job import Job
from shoestring.planning.plan import Outcome
from shoestring.processes.group.launch import run_group
from shoestring.processes.group.rendezvous import Rendezvous
from shoestring.processes.group.round import Invitation
from shoestring.processes.launch import fingerprint, run_worker
from shoestring.processes.messages import OutOfMemory
from shoestring.processes.nodes import Team
from shoestring.processes.task import task_text
from shoestring.runs.events.event import Event
from shoestring.runs.reports.report import report_of
from shoestring.runs.reports.tensorboard import Board
from shoestring.runs.request import Request
from shoestring.runs.session import Execution, Session
from shoestring.show.moving_line import MovingLine
from shoestring.show.output import say, screen
from shoestring.show.ticker import Ticker
from shoestring.training.commands.job_flags import JobLoader
from shoestring.training.commands.progress import Shower
from shoestring.training.commands.run_plan import (
    after_memory_ran_out,
    following_plan,
    new_plan,
    request_without_workers,
    require_means,
    why_unplaced,
)
from shoestring.training.evidence.tasks import Position, specs_of
from shoestring.training.execution.batch_sizes import expected_batches
from shoestring.training.execution.final_report import training_report
from shoestring.training.execution.recorder import RecordingSettings
from shoestring.training.execution.tasks import TrainResult, TrainTask
from shoestring.training.execution.verification import worker_environment
from shoestring.training.options import TrainCommand
from shoestring.training.planning.admission import check_together
from shoestring.training.planning.plan import TrainingOutcome, TrainingPlan, check_paths, plan_in
from shoestring.training.report.outcome_text import training_outcome_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from shoestring.core.command_line.command import Call


@dataclass
class TrainRun(Execution[TrainingPlan, TrainResult]):
    asked: TrainCommand
    call: Call
    session: Session
    loader: JobLoader
    workers: Team
    rendezvous: Rendezvous | None  # where other machines wait, if there are any
    request: Request = field(init=False)  # the request that is planned for

    def __post_init__(self) -> None:
        self.adopt, self.request = self.asked.run.adopt, self.session.request

    @cached_property
    def job(self) -> Job:
        return self.loader.job(self.session.request.flags)

    # Planning

    def read_plan(self, file: Mapping[str, Any]) -> TrainingPlan:
        return plan_in(file)

    def accept(self, kept: TrainingPlan) -> TrainingPlan | None:
        if self.asked.replan:
            return self.following_plan()
        if reason := why_unplaced(kept, self.workers.world):
            self.request = request_without_workers(self.session.folder, self.request, reason, self.workers.world)
            say(self.call, f"{reason}: planning again, for these workers")
            return None
        check_paths(kept.techniques, self.asked.plan.use_texts or (), self.session.folder.path / "plan.json")
        check_together(
            kept.techniques
        )  # the rest was checked when the run was started; no need to inspect the data again
        return kept

    def following_plan(self) -> TrainingPlan:
        return following_plan(self.asked.plan, self.job, self.session.folder, self.request.exact, self.workers)

    def choose(self) -> TrainingOutcome:
        if self.asked.replan:
            return Outcome(self.following_plan())
        return new_plan(self.asked.plan, self.call, self.job, self.session.folder, self.request, self.workers)

    def note_plan(self, outcome: TrainingOutcome) -> None:
        (self.session.folder.path / "plan-next.json").unlink(missing_ok=True)
        if not self.call.json and outcome.plain is not None:  # so that a log has it before training starts
            print(training_outcome_text(outcome, screen(sys.stdout)), "", sep="\n", flush=True)

    # Training

    def execute(self, plan: TrainingPlan) -> TrainResult:
        folder, job = self.session.folder, self.job
        require_means(plan, self.workers, folder.path)
        try:
            return self.run_and_show(self.task(plan), job, plan)
        except OutOfMemory as error:
            told = after_memory_ran_out(self.call, self.workers, job, self.session, plan, str(error))
            raise OverBudget(told, plan) from error

    def task(self, plan: TrainingPlan) -> TrainTask:
        path, request = self.loader.path, self.session.request
        return TrainTask(
            file=str(path),
            flags=request.flags,
            techniques=specs_of(plan.techniques),
            recording=RecordingSettings(
                str(self.session.folder.path),
                self.asked.run.cadence,
                request.memory,
                int(plan.predicted["process_bytes"]),
                str(path.parent),
            ),
            traceback=self.call.traceback,
            expected=expected_batches(plan),
            position=Position(speeds=plan.details.speeds),
        )

    def run_and_show(self, task: TrainTask, job: Job, plan: TrainingPlan) -> TrainResult:
        """Train, and show the events."""
        board = Board(self.session.folder.path) if self.asked.tensorboard else None
        line = MovingLine()
        ticker = Ticker(line.remind)
        show = Shower(self.call, line, job, self.session.held, ticker)

        def on_event(event: Event) -> None:
            if board is not None:
                board.add(event)
            show(event)

        lock, environment = self.session.held.lock.file, worker_environment(plan.techniques)
        try:
            with ticker.running():
                if self.workers.world == 1:
                    return run_worker(task, environment, on_event, lock, say_stopping)
                self.invite(task)
                return run_group(task, environment, self.workers, on_event, lock, self.rendezvous, on_stop=say_stopping)
        finally:
            line.end()
            if board is not None:
                board.close()

    def invite(self, task: TrainTask) -> None:
        """Send the task to the machines at the rendezvous."""
        if self.rendezvous is None:
            return
        assert task.recording is not None, "the command trains in a folder"
        folder = str(self.session.folder.path.resolve())
        there = replace(task, recording=replace(task.recording, folder=folder))
        self.rendezvous.invite(Invitation(task_text(there), self.session.request, fingerprint(task.file)))

    def report(self, plan: TrainingPlan, ended: TrainResult) -> Mapping[str, Any]:
        return training_report(self.job, plan, report_of(self.session.folder.path), ended)


def say_stopping() -> None:
    """Written past Python's stream, which may be in the middle of a line when the signal arrives."""
    with suppress(OSError):
        os.write(sys.stderr.fileno(), b"\nstopping after this step, with a checkpoint; once more to stop at once\n")
