"""The last resort of planning: plain training, when shoestring's own inspection of a model failed.

Inspection (blocks, a rehearsal, the tracker, a trial) can fail for a model that trains well, by an error of ours or of
user code that only inspection calls. A few plain steps, without inspection, tell which: if they fail too, the job
itself fails, and their error is reported. Else the plan is plain training, and says that nothing is predicted and why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, islice

from torch import nn

from shoestring.core.errors import Crashed, JobFailed, Mistake, OverBudget
from shoestring.core.job import Job
from shoestring.core.running import random_state
from shoestring.core.units import bytes_text
from shoestring.core.user_code.blame import blame_for, failure_text
from shoestring.core.user_code.foreign import copy_module
from shoestring.data.feed import looking
from shoestring.data.lengths import planned_batches
from shoestring.measure.process import memory_free
from shoestring.processes.task import Worker
from shoestring.training.evidence.as_found import as_found
from shoestring.training.evidence.rehearsals import COPIES, NoRoom
from shoestring.training.evidence.rehearse import build_run
from shoestring.training.evidence.tasks import TrialResult, TrialTask
from shoestring.training.loop import steps
from shoestring.training.planning.plan import TrainingDetails, TrainingPlan, training_plan

STEPS = 3  # number of plain steps to try


def is_an_answer(error: Exception) -> bool:
    """Whether an error during inspection is itself the answer for the user: the request is impossible, or memory ran
    out."""
    refused = isinstance(error, (Mistake, OverBudget)) and not isinstance(error, (JobFailed, NoRoom))
    return refused or isinstance(error, MemoryError)


@dataclass(frozen=True)
class PlainOnly:
    """A job that shoestring could not inspect, and why."""

    job: Job
    error: Exception
    worker: Worker | None = None  # runs tasks of a job file in a child process; None: everything is tried here
    model: nn.Module | None = None  # use this model object instead of the job's factory
    environment: Mapping[str, str] = field(default_factory=dict)  # of the worker
    largest: Job | None = None  # the job planned for the batch that needs most memory, if that is known,
    numbers: tuple[int, ...] = ()  # and the candidates for that batch
    subject: str = "this model"  # what could not be inspected
    doubt: str = ""  # why the job's data may be the cause, if the job fails

    @property
    def reason(self) -> str:
        told = isinstance(self.error, (Mistake, Crashed))  # from a worker, whose stack frames are not here
        said = str(self.error).strip().splitlines()[0] if told else failure_text(self.error)
        return f"shoestring could not look at {self.subject} ({said})"

    def refusal(self, what: str) -> Mistake:
        """The error for a request that is impossible for this job, when the job itself does not fail."""
        self.try_plain()
        return Mistake(f"{what}: {self.reason}, so nothing is known of it; plain training by one worker works")

    def plan(self, memory: int | None) -> TrainingPlan:
        """Plain training, with the figures that plain steps gave; `memory`: bytes that the user allows."""
        tried = self.try_plain()
        found = training_plan(
            details=TrainingDetails(looked=False),
            basis=f"{self.reason}, so nothing is predicted and no technique is offered; plain training works",
        )
        if tried is None:
            return found
        found = replace(
            found.predicting(process_bytes=tried.process_bytes, step_seconds=tried.step_seconds),
            basis=f"{found.basis}: the process and a step are those of {tried.steps} plain steps",
        )
        if memory is not None and tried.process_bytes > memory:
            raise OverBudget(
                f"plain training needs {bytes_text(tried.process_bytes)}, more than the {bytes_text(memory)} of --memory, "
                f"and {self.reason}, so no technique is offered that may need less",
                found,
            ) from self.error
        return found

    def try_plain(self) -> TrialResult | None:
        """Run plain steps, by the worker or here; None if they would tell nothing or are impossible. Raises the job's
        own error."""
        if self.worker is not None and self.job.origin is not None:
            origin = self.job.origin
            count = min(STEPS, self.job.steps) if self.job.steps else STEPS
            task = TrialTask(
                file=origin.file, flags=dict(origin.flags), steps=count, largest=self.numbers, tracked=False
            )
            try:
                return self.worker(task, self.environment)
            except JobFailed as error:
                raise JobFailed(f"{error}; {self.doubt}" if self.doubt else str(error)) from error
        if isinstance(self.error, NoRoom) or blame_for(self.error).ours:
            return None
        with random_state.fork_rng(), as_found(self.job):
            random_state.seed(self.job.seed)
            model = self.model_to_try()
            if model is not None:
                random_state.seed(self.job.seed)
                self.step_here(model)
        return None

    def step_here(self, model: nn.Module) -> None:
        """Run a few plain steps of a model, with the first batches and the largest."""
        run = build_run(self.job, (), model, tracked=False)
        with looking(self.job) as feed:
            largest = (
                planned_batches(self.largest)
                if self.largest is not None and self.largest.largest is not None
                else iter(())
            )
            for _ in steps(run, chain(islice(feed, STEPS), islice(largest, 1))):
                pass

    def model_to_try(self) -> nn.Module | None:
        """A model to try; None if the given object can't be copied (training need not copy it) or does not fit."""
        if self.model is None:
            return self.job.model()
        if COPIES * sum(one.nbytes for one in self.model.parameters()) > memory_free():
            return None
        try:
            return copy_module(self.model, {})
        except Exception:
            return None
