"""Check techniques that were not planned for the job they are used with, by a rehearsal of its plain step, as the
planner would."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn

from shoestring.core.costs.hardware import Hardware
from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness
from shoestring.core.job import Job
from shoestring.core.technique import parse_technique
from shoestring.core.user_code.user_functions import value_text
from shoestring.data.feed import with_step_count
from shoestring.data.lengths import shared_data
from shoestring.planning.answers import MeasuredAnswers
from shoestring.planning.plan import Outcome, Plan, techniques_text
from shoestring.processes.task import Worker
from shoestring.training.catalogue import CATALOGUE
from shoestring.training.evidence.as_found import as_found
from shoestring.training.planning.admission import check_together, is_same_job
from shoestring.training.planning.plan import TrainingOutcome, TrainingPlan
from shoestring.training.planning.planner import Planner
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
    """How close named techniques stay to plain training of a job; refused if they can't be used for it. `kept`:
    measurements of earlier plannings of the job."""
    if not techniques:
        return Exactness.BITS
    check_together(techniques)
    planner = Planner(
        with_step_count(shared_data(job)),
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
    with as_found(job):
        return planner.check_named(techniques).exactness


def unchecked_techniques(plan: TrainingPlan | TrainingOutcome, job: Job) -> tuple[Technique, ...]:
    """The techniques of a plan, unless it was made for this very job in this process: they have not been checked for it
    yet."""
    chosen = plan.chosen if isinstance(plan, Outcome) else plan
    return () if is_same_job(chosen.made_for, job) else chosen.techniques


def given_techniques(given: Any) -> tuple[Technique, ...]:
    """Techniques that a script names, as objects or as `--use` takes them; one may stand alone."""
    several = isinstance(given, Iterable) and not isinstance(given, str)
    found = [
        parse_technique(item, CATALOGUE) if isinstance(item, str) else item for item in (given if several else (given,))
    ]
    for item in found:
        if not isinstance(item, Technique):
            raise Mistake(
                f"{value_text(item)} is no technique: give the result of shoestring.plan, or techniques such as "
                f'["Checkpoint(every=2)"]'
            )
    return tuple(found)


def techniques_for(
    job: Job,
    plan: TrainingPlan | TrainingOutcome | Iterable[Technique | str],
    model: nn.Module | None,
    worker: Worker | None = None,
) -> tuple[Technique, ...]:
    """The techniques of a plan, checked for the job unless the plan was made for it. Warns about inexact techniques,
    and about settings that have no effect in a process that runs already."""
    if isinstance(plan, (Plan, Outcome)):
        check_named(job, unchecked_techniques(plan, job), model, worker)
        return plan.chosen.techniques if isinstance(plan, Outcome) else plan.techniques
    techniques = given_techniques(plan)
    if (level := check_named(job, techniques, model, worker)) is Exactness.CHANGED:
        warnings.warn(f"{techniques_text(techniques)} is {level.word} for this job: {level.meaning}", stacklevel=2)
    if late := tuple(one for one in techniques if one.environment):
        warnings.warn(
            f"{techniques_text(late)} is set when a process starts, and this one runs already: it has no effect here, and the weights are "
            f"the same; shoestring train starts a process with it",
            stacklevel=2,
        )
    return techniques
