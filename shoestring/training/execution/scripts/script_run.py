"""A run folder for a script or notebook: the training of `shoestring train`, in the caller's own process, one step at a
time.

The folder is the same: it can be watched, exported and resumed, and the run of a job file also by the command. A job
made by a script has no file that shows whether it is still the same one, so its visible properties (its model's
weights, its numbers) are stored instead.
"""

from __future__ import annotations

import hashlib
import warnings
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shoestring.core.command_line.options import as_arguments
from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.core.running.run_weights import bring_home
from shoestring.core.running.signals import deliver, restore_handlers
from shoestring.data.lengths import check_given
from shoestring.jobfile import IMPORTED, resolved_arguments
from shoestring.processes.task import Worker
from shoestring.runs.events.event import Adopted, Event, Planning, Warned
from shoestring.runs.events.event_log import note
from shoestring.runs.modules import changed_text, imported_modules, kept_modules, refusal
from shoestring.runs.options import RunOptions
from shoestring.runs.reports.report import report_of
from shoestring.runs.request import Request, environment_now, request_for
from shoestring.runs.resume import open_run, without_a_step
from shoestring.runs.session import PLAN, RoomRun, Session
from shoestring.show.page import page
from shoestring.training.execution.batch_sizes import expected_batches
from shoestring.training.execution.final_report import training_report
from shoestring.training.execution.recorder import RecordingSettings
from shoestring.training.execution.tasks import TrainResult
from shoestring.training.execution.training import Training
from shoestring.training.planning.named_plan import check_named
from shoestring.training.planning.plan import TrainingOutcome, TrainingPlan, check_paths, plan_in

SEEN = ("batch", "steps", "epochs", "seed", "clip", "every", "goal", "patience")  # numbers of a job


def job_description(job: Job, model: nn.Module) -> str:
    """The visible properties of a job made by a script, as a file that says so."""
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    weights = "\n".join(f"{name} {tuple(value.shape)} {value.dtype}" for name, value in state.items())
    numbers = "\n".join(f"{name}={getattr(job, name)!r}" for name in SEEN)
    return f'"""A job that a script made; this is what can be seen of it.\n\n{type(model).__name__}\n{weights}\n\n{numbers}\n"""\n'


def request_of(job: Job, model: nn.Module) -> tuple[Request, bytes]:
    """A script's request, and the source of its job."""
    if job.origin is not None:
        path = Path(job.origin.file)
        asked = request_for(path, dict(job.origin.flags), None, None, False, None, room="training")
        return replace(asked, arguments=resolved_arguments(job)), path.read_bytes()
    text = job_description(job, model).encode()
    name = f"{type(model).__name__}.py"  # named as a file of it would be
    digest = hashlib.sha256(text).hexdigest()
    return Request(job=name, source=digest, room="training", environment=environment_now()), text


class ScriptRun(RoomRun[TrainingPlan, TrainResult]):
    """A script's run, which this process holds until it is closed."""

    def __init__(self, job: Job, outcome: TrainingOutcome, model: nn.Module, asked: RunOptions) -> None:
        check_given(job)
        assert asked.run is not None, "a run has a folder"
        self.job, self.outcome, self.model, self.cadence, self.adopt = job, outcome, model, asked.cadence, asked.adopt
        request, source = request_of(job, model)
        self.session = Session(
            open_run(Path(asked.run), request, source, asked.fresh, asked.adopt), page, by_script=True
        )
        try:
            if job.origin is not None and not asked.adopt:
                self.refuse_changed_modules()
            self.plan = self.session.settle(self)
        except BaseException:
            self.session.held.lock.release()
            raise

    def refuse_changed_modules(self) -> None:
        """Refuse to resume if a module imported by the job's file has changed; changes in other modules of the script
        cause a warning."""
        known, now = kept_modules(self.session.folder) or {}, imported_modules(IMPORTED)
        changed = [name for name, digest in now.items() if known.get(name, digest) != digest]
        if changed and not without_a_step(self.session.folder.path):
            raise refusal(self.session.folder, map(changed_text, changed))

    def read_plan(self, file: Mapping[str, Any]) -> TrainingPlan:
        return plan_in(file)

    def accept(self, kept: TrainingPlan) -> TrainingPlan | None:
        """The plan that the run was started with: another would not give the same bits, unless that is accepted
        (`adopt`)."""
        given, folder = self.outcome.chosen, self.session.folder.path
        if kept.techniques == given.techniques:
            return kept
        if self.adopt:
            note(folder, Adopted((f"the plan {given} instead of {kept}",)))
            return None
        check_paths(kept.techniques, given.techniques, folder / PLAN)
        self.check_kept(kept)
        told = f"the run goes on with the plan it was begun with, {kept}, not with {given}: --adopt takes that one"
        note(folder, Warned(told))
        warnings.warn(as_arguments(told), stacklevel=2)
        return kept

    @abstractmethod
    def check_kept(self, plan: TrainingPlan) -> None:
        """Refuse a stored plan that is not the given one and can't be used for the job."""

    def choose(self) -> TrainingOutcome:
        note(self.session.folder.path, Planning(self.session.request.memory))
        return self.outcome

    def note_plan(self, outcome: TrainingOutcome) -> None:
        for text in outcome.chosen.warnings:
            warnings.warn(as_arguments(text), stacklevel=2)

    def recording(self) -> RecordingSettings:
        folder, process = self.session.folder.path.resolve(), self.plan.predicted["process_bytes"]
        return RecordingSettings(str(folder), self.cadence, self.session.request.memory, int(process))

    def report(self, plan: TrainingPlan, ended: TrainResult) -> Mapping[str, Any]:
        return training_report(self.job, plan, report_of(self.session.folder.path), ended)


class ScriptRunHere(ScriptRun):
    """In the script's own process. `worker`: tries things in child processes, if the model is the job file's own."""

    def __init__(
        self, job: Job, outcome: TrainingOutcome, model: nn.Module, asked: RunOptions, worker: Worker | None = None
    ) -> None:
        self.worker = worker
        super().__init__(job, outcome, model, asked)

    def check_kept(self, plan: TrainingPlan) -> None:
        check_named(self.job, plan.techniques, self.model if self.worker is None else None, self.worker)

    def steps(self) -> Iterator[tuple[int, float, Any]]:
        """Train: number, loss and metrics of every step. A caller that stops requesting steps leaves a run that can be
        resumed."""
        with self.session, self.session.noting_failure(), restore_handlers():
            expected = expected_batches(self.plan)
            made = Training(self.job, self.plan.techniques, self.recording(), silent, expected, self.model)
            assert made.recorder is not None, "there is a folder"
            try:
                for number in made.each():
                    yield number, made.losses[-1], made.course.metrics(number)
                self.finish(made)
            except GeneratorExit:
                made.recorder.stop = "the script did not ask for more"
                self.finish(made)
                raise
            finally:
                made.feed.close()
                made.recorder.close()
            asked = made.recorder.signal
        if asked and not made.course.over(made.number):  # saved: now the signal takes its normal effect
            deliver(asked)

    def finish(self, made: Training) -> None:
        """Record the end in the folder, and leave the weights in the model."""
        result = made.finish()
        self.session.end(self, self.plan, result)
        if result.unsaved:
            raise Mistake(result.unsaved)
        bring_home(made.run)


def silent(event: Event) -> None:
    """Ignores an event, because the folder has it."""
