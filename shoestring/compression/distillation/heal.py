"""Healing: a compressed model learns what the original says, without labels, on the original job's data."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import nn

from shoestring.compression.distillation.losses import parsed
from shoestring.compression.distillation.method import distilled
from shoestring.compression.distillation.teachers import LoadedTeacher, Teachers
from shoestring.core.errors import Mistake
from shoestring.core.job import Job, target

TRIED = 3  # steps that are timed, after one that is not


def healing_job(
    original: Job,
    teacher: Callable[[], nn.Module],
    student: Callable[[], nn.Module],
    *,
    data: Callable[[], Any] | None = None,
    objective: str = "mse + cosine",
    temperature: float = 1.0,
    lr: float = 1e-4,
    steps: int = 0,
    seconds: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Job:
    """A job that trains the student towards the teacher's outputs, on the original's data or on others of the same structure.

    Label-free: the original's loss is never asked. `objective`: "mse + cosine" for embeddings, "kl" for logits, with hidden(...) for states
    in between. Either `steps`, or `seconds`, which are turned into steps by timing a few with `clock`. The original's held-out data judge
    it, by this loss and by the original's own metrics; the rate falls to 0 along a half cosine (Loshchilov, Hutter: SGDR, 2017, arXiv
    1608.03983).
    """
    parsed(objective)  # a mistake in it is told before anything is built
    if not lr > 0 or bool(steps) == bool(seconds):
        raise Mistake(
            f"healing with lr={lr:g}, steps={steps}, seconds={seconds:g}: give a rate above 0, and either steps or seconds"
        )
    goal = "min loss" if original.held_out is not None and target(original.goal).metric == "loss" else original.goal
    beside = replace(original, sampler=None, collate=None, workers=0) if data is not None else original
    own = replace(
        beside,
        model=student,
        data=data or original.data,
        weights="",
        goal=goal,
        epochs=0,
        steps=steps or 1,
        patience=0,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0),
        schedule=falling,
    )
    job = distilled(
        own,
        Teachers((lambda: LoadedTeacher(teacher(), original.forward),)),
        objective=objective,
        temperature=temperature,
        alpha=1.0,
    )
    return job if steps else replace(job, steps=steps_in(job, seconds, clock))


def falling(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """A rate that falls to 0 along a half cosine."""
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def steps_in(job: Job, seconds: float, clock: Callable[[], float]) -> int:
    """How many steps of the job fit into so many seconds here, by timing a few of them on a model of its own; at least one."""
    from shoestring.data.feed import looking
    from shoestring.runs.initial_weights import fresh_model
    from shoestring.training.evidence.rehearse import prepared
    from shoestring.training.loop import steps

    run = prepared(job, (), fresh_model(job))
    with looking(job) as feed:
        batches = list(islice(feed, 1 + TRIED))
    list(steps(run, batches[:1]))
    begun = clock()
    count = len(list(steps(run, batches[1:] or batches)))
    return max(int(seconds * count / (clock() - begun)), 1)
