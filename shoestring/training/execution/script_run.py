"""A run folder from a script or a notebook: the training of `shoestring train`, in the caller's own process and one step at a time.

The folder is the same: it can be watched, exported and gone on with, and the run of a job file also by the command. A job that a script
made has no file that tells whether it is still the same one; what can be seen of it (its model's weights, its numbers) is kept instead.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.core.options import as_arguments
from shoestring.core.run_weights import brought_home
from shoestring.core.signals import deliver, handlers_restored
from shoestring.data.lengths import check_given
from shoestring.jobfile import IMPORTED, resolved_arguments
from shoestring.processes.task import Worker
from shoestring.runs.event import Adopted, Event, Planning, Warned
from shoestring.runs.events import note
from shoestring.runs.modules import changed_text, imported_modules, kept_modules, refusal
from shoestring.runs.options import RunOptions
from shoestring.runs.report import Report, report_of
from shoestring.runs.request import Request, environment_now, request_for
from shoestring.runs.resume import OpenedRun, opened, without_a_step
from shoestring.runs.session import PLAN, Session, kept_plan
from shoestring.show.page import page
from shoestring.training.execution.batch_sizes import expected_batches
from shoestring.training.execution.final_report import finished_report
from shoestring.training.execution.recorder import RecordingSettings
from shoestring.training.execution.tasks import TrainResult
from shoestring.training.execution.training import Training
from shoestring.training.named_plan import check_named
from shoestring.training.plan import TrainingOutcome, TrainingPlan, check_paths, plan_in

SEEN = ("batch", "steps", "epochs", "seed", "clip", "every", "goal", "patience")  # numbers of a job


def described(job: Job, model: nn.Module) -> str:
    """What can be seen of a job that a script made, as a file that says so."""
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    weights = "\n".join(f"{name} {tuple(value.shape)} {value.dtype}" for name, value in state.items())
    numbers = "\n".join(f"{name}={getattr(job, name)!r}" for name in SEEN)
    return f'"""A job that a script made; this is what can be seen of it.\n\n{type(model).__name__}\n{weights}\n\n{numbers}\n"""\n'


def request_of(job: Job, model: nn.Module) -> tuple[Request, bytes]:
    """What a script asks for, and the source of its job."""
    if job.origin is not None:
        path = Path(job.origin.file)
        asked = request_for(path, dict(job.origin.flags), None, None, False, None)
        return replace(asked, arguments=resolved_arguments(job)), path.read_bytes()
    text = described(job, model).encode()
    name = f"{type(model).__name__}.py"  # named as a file of it would be
    return Request(job=name, source=hashlib.sha256(text).hexdigest(), environment=environment_now()), text


class Scripted:
    """A run of a script, held by this process until it is closed."""

    def __init__(
        self, job: Job, outcome: TrainingOutcome, model: nn.Module, asked: RunOptions, worker: Worker | None = None
    ) -> None:
        """`worker`: who tries things of a job file, if the model is the file's."""
        check_given(job)
        assert asked.run is not None, "a run has a folder"
        self.job, self.model, self.cadence, self.worker = job, model, asked.cadence, worker
        request, source = request_of(job, model)
        self.session = Session(opened(Path(asked.run), request, source, asked.fresh, asked.adopt), page, by_script=True)
        try:
            if job.origin is not None and not asked.adopt:
                self.refuse_changed_modules()
            self.plan = self.settled_plan(outcome, asked.adopt)
        except BaseException:
            self.held.lock.release()
            raise

    @property
    def held(self) -> OpenedRun:
        return self.session.held

    def refuse_changed_modules(self) -> None:
        """Refuse to go on where a module that the job's file imports has changed; of other modules of the script it is told."""
        known, now = kept_modules(self.held.folder) or {}, imported_modules(IMPORTED)
        changed = [name for name, digest in now.items() if known.get(name, digest) != digest]
        if changed and not without_a_step(self.held.folder.path):
            raise refusal(self.held.folder, map(changed_text, changed))

    def settled_plan(self, outcome: TrainingOutcome, adopt: bool) -> TrainingPlan:
        """The plan that the run was begun with: going on with another would not give the same bits, unless that is wanted (`adopt`). A new
        run takes the one given."""
        given, path = outcome.chosen, self.held.folder.path / PLAN
        before = None if self.held.changed else kept_plan(self.held.folder, plan_in, adopt)
        if before is not None and before.techniques == given.techniques:
            return before
        if before is not None and not adopt:
            check_paths(before.techniques, given.techniques, path)
            self.check_kept(before)
            told = (
                f"the run goes on with the plan it was begun with, {before}, not with {given}: --adopt takes that one"
            )
            note(self.held.folder.path, Warned(told))
            warnings.warn(as_arguments(told), stacklevel=2)
            return before
        note(
            self.held.folder.path,
            Planning(self.held.request.memory)
            if before is None
            else Adopted((f"the plan {given} instead of {before}",)),
        )
        self.held.folder.write(PLAN, outcome.as_json())
        for text in given.warnings:
            note(self.held.folder.path, Warned(text))
            warnings.warn(as_arguments(text), stacklevel=2)
        return given

    def check_kept(self, plan: TrainingPlan) -> None:
        """Refuse a plan that the folder keeps, is not the one given, and can't be used for the job."""
        check_named(self.job, plan.techniques, self.model if self.worker is None else None, self.worker)

    def steps(self) -> Iterator[tuple[int, float, Any]]:
        """Train: number, loss and metrics of every step. Whoever stops asking leaves a run that can be gone on with."""
        folder = self.held.folder
        with self.session, self.session.noting_failure(), handlers_restored():
            recording = RecordingSettings(
                str(folder.path), self.cadence, self.held.request.memory, int(self.plan.predicted["process_bytes"])
            )
            made = Training(self.job, self.plan.techniques, recording, silent, expected_batches(self.plan), self.model)
            assert made.recorder is not None, "there is a folder"
            try:
                for number in made.each():
                    yield number, made.losses[-1], made.course.metrics(number)
                self.ended(made)
            except GeneratorExit:
                made.recorder.stop = "the script did not ask for more"
                self.ended(made)
                raise
            finally:
                made.feed.close()
                made.recorder.close()
            asked = made.recorder.signal
        if asked and not made.course.over(made.number):  # saved; now the signal does what it would have done
            deliver(asked)

    def ended(self, made: Training) -> None:
        """Say how it ended, in the folder, and leave the weights in the model."""
        result = made.ended()
        if result.stopped is None and not result.unsaved:
            self.finish(result)
        else:
            self.session.write_page()
        if result.unsaved:
            raise Mistake(result.unsaved)
        brought_home(made.run)

    def finish(self, result: TrainResult) -> Report:
        """Write the report and the page. The weights are safe, so what can't be written is told of."""
        told = report_of(self.held.folder.path)
        self.session.finish(finished_report(self.job, self.held.request, self.plan, told, result))
        return self.session.write_page()


def silent(event: Event) -> None:
    """The folder has it."""
