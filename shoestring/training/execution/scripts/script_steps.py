"""A script's training steps in its own process, with or without a run folder."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.core.running import random_state
from shoestring.core.running.run_weights import bring_home
from shoestring.data.feed import NO_BATCH, Feed
from shoestring.measure.instructions import require
from shoestring.planning.plan import Outcome, Plan
from shoestring.processes.task import Worker
from shoestring.runs.options import RunOptions
from shoestring.runs.weights.initial_weights import fill_weights, fresh_model, source
from shoestring.training.evidence.rehearse import build_run
from shoestring.training.execution.job_planning import plan_job, workers
from shoestring.training.execution.scripts.script_run import ScriptRunHere
from shoestring.training.loop import finite, steps
from shoestring.training.memory.precision import DTYPES
from shoestring.training.options import PlanOptions
from shoestring.training.planning.named_plan import check_named, given_techniques, unchecked_techniques
from shoestring.training.planning.plan import TrainingOutcome, TrainingPlan
from shoestring.training.progress import Progress
from shoestring.training.technique import TrainingTechnique

SHORT = {dtype: name for name, dtype in DTYPES.items()}  # names of dtypes whose products may crash the process
ScriptStep = tuple[int, float, Any]  # number, loss, and metrics of the validation after it


def kept_steps(
    job: Job,
    plan: TrainingPlan | TrainingOutcome | Iterable[TrainingTechnique | str],
    model: nn.Module | None,
    asked: RunOptions,
) -> Generator[ScriptStep, None, None]:
    """Train in this process, in a run folder."""
    worker = worker_of(job, model)
    if isinstance(plan, (Plan, Outcome)):
        check_named(job, unchecked_techniques(plan, job), model, worker)
    if model is None:
        model = fresh_model(job)
    if not isinstance(plan, (Plan, Outcome)):
        plan = plan_job(job, PlanOptions(use=given_techniques(plan)), model=model)
    outcome = Outcome(plan) if isinstance(plan, Plan) else plan
    yield from ScriptRunHere(job, outcome, model, asked, worker).steps()


def worker_of(job: Job, model: nn.Module | None) -> Worker | None:
    """The worker that tries things of a job file in child processes, if the file's own model is trained and not another
    one."""
    return workers(1) if job.origin is not None and model is None else None


def steps_here(
    job: Job, techniques: tuple[TrainingTechnique, ...], model: nn.Module | None
) -> Generator[ScriptStep, None, None]:
    """Train in this process with techniques that can be used for the job."""
    if model is None:
        random_state.seed(job.seed)
        model = fill_weights(job.model(), job).to("cuda" if torch.cuda.is_available() else "cpu")
        if (found := source(model, job)) and found.note:
            warnings.warn(f"the job's weights: {found.note}", stacklevel=6)
    random_state.seed(job.seed)
    for dtype in {parameter.dtype for parameter in model.parameters() if parameter.device.type == "cpu"}:
        if dtype in SHORT:  # Precision checks it itself
            require(SHORT[dtype])
    feed = Feed(job)
    counted_job = replace(job, steps=feed.steps_in_all, epochs=0) if feed.steps_in_all else job
    run = build_run(counted_job, techniques, model, tracked=False)
    feed.assignment = run.team.assignment
    course, number = Progress(job, run, feed), 0
    for number, loss in enumerate(steps(run, course.batches()), 1):
        value = finite(float(loss), number)
        yield (number, value, course.validate(number).metrics if course.due(number) else {})
        if course.over(number):
            break
    if not number:
        raise Mistake(NO_BATCH)
    bring_home(run)
