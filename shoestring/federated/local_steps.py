"""What a device does with what the Job says of steps in general: its optimizer, its clip and its schedule hold for devices, too, unless
Local has its own.

A schedule begins anew with every device's work in every round, as an optimizer's moments do. What has no meaning on a device is told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from shoestring.core.errors import Mistake
from shoestring.core.job import Job, default_optimizer
from shoestring.core.local import Local
from shoestring.core.schedule import EXAMPLE, PerEpoch, takes_steps


def on_devices(job: Job) -> Job:
    """The job with all in its Local that devices follow."""
    local = job.local
    optimizer = job.optimizer if takes_the_jobs(job) else local.optimizer
    return replace(
        job,
        local=replace(local, optimizer=optimizer, clip=local.clip or job.clip, schedule=local.schedule or job.schedule),
    )


def takes_the_jobs(job: Job) -> bool:
    """Whether devices step by the Job's optimizer: it has one, and its Local says nothing else."""
    return job.optimizer is not default_optimizer and job.local.optimizer is None and job.local.lr is None


def not_as_in_one_place(job: Job) -> list[str]:
    """What the Job says that devices do not follow, or follow in their own way, and what to give instead."""
    found = []
    if takes_the_jobs(job):
        found.append(
            "devices step by Job(optimizer=...), made anew in every round, because Local has neither lr nor optimizer"
        )
    elif job.optimizer is not default_optimizer and job.local.optimizer is None:
        found.append(
            f"devices step by plain SGD with lr={job.local.rate:g}, as Local says: Job(optimizer=...) is for training in one "
            f"place; give Local(optimizer=...) for another"
        )
    if job.sampler is not None:
        found.append(
            "Job(sampler=...) is for training in one place: a device goes through its own records in a random order"
        )
    if job.patience:
        found.append("Job(patience=...) is for training in one place: a federation ends after --rounds")
    return found


def schedule_steps(job: Job, local: Local, optimizer: Any, steps: int, per_epoch: int) -> Callable[[int], None]:
    """What to call after every step of a device's work, with the number of steps that are done."""
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

    def stepped(done: int) -> None:
        if not done % every:
            scheduler.step()

    return stepped
