"""Techniques that come with a job and were not planned for it: checked by a rehearsal of its plain step, as the planner checks them."""
from __future__ import annotations

import warnings
from collections.abc import Iterable

from torch import nn

from shoestring.core.exactness import Exactness
from shoestring.core.hardware import Hardware
from shoestring.core.job import Job
from shoestring.core.training import TrainingTechnique as Technique
from shoestring.data.feed import counted
from shoestring.data.lengths import shared_data
from shoestring.planning.admission import check_together, is_same_job
from shoestring.planning.evidence.tasks import Worker
from shoestring.planning.outcome import Outcome
from shoestring.planning.plan import Plan
from shoestring.planning.planner import Planner
from shoestring.planning.room import named


def check_named(job: Job, techniques: tuple[Technique, ...], model: nn.Module | None = None, worker: Worker | None = None,
                exact: str | None = None, devices: int = 1, here: int | None = None) -> Exactness:
    """Refuse techniques that a user named and that can't be used for a job; else how close they stay to plain training."""
    if not techniques:
        return Exactness.BITS
    check_together(techniques)
    planner = Planner(counted(shared_data(job)), Hardware(), worker, model, exact=exact, wanted=techniques, only=True, devices=devices,
                      here=here or devices)
    return planner.admitted(techniques).exactness


def techniques_for(job: Job, plan: Plan | Outcome | Iterable[Technique], model: nn.Module | None) -> tuple[Technique, ...]:
    """The techniques of a plan, which was made for this job or is checked for it. Of techniques alone, it is told what they change."""
    chosen = plan.chosen if isinstance(plan, Outcome) else plan
    if isinstance(chosen, Plan):
        if not is_same_job(chosen.job, job):
            check_named(job, chosen.techniques, model)
        return chosen.techniques
    techniques = tuple(chosen)
    if (level := check_named(job, techniques, model)) is Exactness.CHANGED:
        warnings.warn(f"{named(techniques)} is {level.word} for this job: {level.meaning}", stacklevel=2)
    return techniques
