"""How devices follow the Job's optimizer, gradient clipping and learning-rate schedule: they use the Job's unless Local
has its own.

Optimizer moments and schedule begin anew for every device in every round. `ignored_settings` lists the settings of a Job
that have no meaning on a device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from shoestring.core.clients.local import Local
from shoestring.core.errors import Mistake
from shoestring.core.job import Job, default_optimizer
from shoestring.core.optimization.schedule import EXAMPLE, PerEpoch, takes_steps


def job_for_devices(job: Job) -> Job:
    """The job with the optimizer, clip and schedule that devices use filled into its Local."""
    local = job.local
    optimizer = job.optimizer if uses_job_optimizer(job) else local.optimizer
    return replace(
        job,
        local=replace(local, optimizer=optimizer, clip=local.clip or job.clip, schedule=local.schedule or job.schedule),
    )


def uses_job_optimizer(job: Job) -> bool:
    """Whether devices use the Job's optimizer: the Job has one, and Local has neither an optimizer nor lr."""
    return job.optimizer is not default_optimizer and job.local.optimizer is None and job.local.lr is None


def optimizer_note(job: Job) -> str:
    """What devices make of the Job's optimizer; empty if it has none of its own, or if Local has one."""
    if uses_job_optimizer(job):
        return (
            "devices step by Job(optimizer=...), made anew in every round, because Local has neither lr nor optimizer"
        )
    if job.optimizer is not default_optimizer and job.local.optimizer is None:
        return (
            f"devices step by plain SGD with lr={job.local.rate:g}, as Local says: Job(optimizer=...) is for training in one "
            f"place; give Local(optimizer=...) for another"
        )
    return ""


def ignored_settings(job: Job) -> list[str]:
    """Warnings for settings of the Job that devices ignore."""
    found = []
    if job.sampler is not None:
        found.append(
            "Job(sampler=...) is for training in one place: a device goes through its own records in a random order"
        )
    if job.patience:
        found.append("Job(patience=...) is for training in one place: a federation ends after --rounds")
    return found


def schedule_steps(job: Job, local: Local, optimizer: Any, steps: int, per_epoch: int) -> Callable[[int], None]:
    """A function to call after every local step with the number of steps done; it advances the device's schedule."""
    if local.schedule is None:
        return lambda done: None
    written = replace(job, schedule=local.schedule)
    made = local.schedule(optimizer, steps) if takes_steps(written) else local.schedule(optimizer)
    scheduler = made.scheduler if isinstance(made, PerEpoch) else made
    if isinstance(scheduler, ReduceLROnPlateau):
        raise Mistake(
            "ReduceLROnPlateau lowers the rate when validation gets no better, and a device's work has none: give the Local "
            "another schedule, by steps"
        )
    if not callable(getattr(scheduler, "step", None)):
        raise Mistake(
            f"the job's schedule gave a {type(scheduler).__name__}, which is no scheduler: give a function that returns one, "
            f"such as {EXAMPLE}"
        )
    every = per_epoch if isinstance(made, PerEpoch) else 1

    def step_schedule(done: int) -> None:
        if not done % every:
            scheduler.step()

    return step_schedule
