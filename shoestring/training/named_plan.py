"""Techniques that come with a job and were not planned for it: checked by a rehearsal of its plain step, as the planner checks them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from torch import nn

from shoestring.core.exactness import Exactness
from shoestring.core.hardware import Hardware
from shoestring.core.job import Job
from shoestring.data.feed import counted
from shoestring.data.lengths import shared_data
from shoestring.planning.answers import MeasuredAnswers
from shoestring.planning.room import named
from shoestring.processes.task import Worker
from shoestring.training.admission import check_together, is_same_job
from shoestring.training.outcome import Outcome
from shoestring.training.plan import Plan
from shoestring.training.planner import Planner
from shoestring.training.technique import TrainingTechnique as Technique


def check_named(
    job: Job,
    techniques: tuple[Technique, ...],
    model: nn.Module | None = None,
    worker: Worker | None = None,
    exact: str | None = None,
    devices: int = 1,
    here: int | None = None,
    kept: MeasuredAnswers | None = None,
) -> Exactness:
    """Refuse techniques that a user named and that can't be used for a job; else how close they stay to plain training. `kept`: what
    earlier plannings of the job measured."""
    if not techniques:
        return Exactness.BITS
    check_together(techniques)
    planner = Planner(
        counted(shared_data(job)),
        Hardware(),
        worker,
        model,
        exact=exact,
        wanted=techniques,
        only=True,
        devices=devices,
        here=here or devices,
        kept=kept,
    )
    return planner.admitted(techniques).exactness


def unchecked(plan: Plan | Outcome, job: Job) -> tuple[Technique, ...]:
    """The techniques of a plan, if it was not made for this very job in this process: then nobody has checked them for it."""
    chosen = plan.chosen if isinstance(plan, Outcome) else plan
    return () if is_same_job(chosen.job, job) else chosen.techniques


def techniques_for(
    job: Job, plan: Plan | Outcome | Iterable[Technique], model: nn.Module | None, worker: Worker | None = None
) -> tuple[Technique, ...]:
    """The techniques of a plan, which was made for this job or is checked for it. Of techniques alone, it is told what they change, and
    what of them has no effect in a process that runs already."""
    if isinstance(plan, (Plan, Outcome)):
        check_named(job, unchecked(plan, job), model, worker)
        return plan.chosen.techniques if isinstance(plan, Outcome) else plan.techniques
    techniques = tuple(plan)
    if (level := check_named(job, techniques, model, worker)) is Exactness.CHANGED:
        warnings.warn(f"{named(techniques)} is {level.word} for this job: {level.meaning}", stacklevel=2)
    if late := tuple(one for one in techniques if one.environment):
        warnings.warn(
            f"{named(late)} is set when a process starts, and this one runs already: it has no effect here, and the weights are "
            f"the same; shoestring train starts a process with it",
            stacklevel=2,
        )
    return techniques
