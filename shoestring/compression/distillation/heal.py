"""Healing: knowledge distillation from the original into the compressed model, without labels, on the job's data."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import nn

from shoestring.compression.distillation.losses import parse_objective
from shoestring.compression.distillation.method import distillation_job
from shoestring.compression.distillation.teachers import LoadedTeacher, Teachers
from shoestring.core.errors import Mistake
from shoestring.core.job import Job, target

TRIED = 3  # timed steps, after one warm-up step


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
    """A job that trains the student towards the teacher's outputs, on the original's data or on other data of the same
    structure.

    No labels are needed: the original's loss is never called. `objective`: "mse + cosine" for embeddings, "kl" for
    logits, plus hidden(...) for hidden states. Give either `steps`, or `seconds`, which are converted to steps by
    timing a few with `clock`. The student is validated on the original's held-out data, by this loss and the original's
    metrics. The learning rate decays to 0 along a half cosine (Loshchilov, Hutter: SGDR, 2017, arXiv 1608.03983).
    """
    parse_objective(objective)  # report mistakes before anything is built
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
        schedule=cosine_decay,
    )
    job = distillation_job(
        own,
        Teachers((lambda: LoadedTeacher(teacher(), original.forward),)),
        objective=objective,
        temperature=temperature,
        alpha=1.0,
    )
    return job if steps else replace(job, steps=steps_in(job, seconds, clock))


def cosine_decay(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """Cosine learning rate decay to 0."""
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def steps_in(job: Job, seconds: float, clock: Callable[[], float]) -> int:
    """Number of training steps that fit into these seconds on this machine, at least 1, by timing a few on a fresh
    model."""
    from shoestring.data.feed import looking
    from shoestring.runs.weights.initial_weights import fresh_model
    from shoestring.training.evidence.rehearse import build_run
    from shoestring.training.loop import steps

    run = build_run(job, (), fresh_model(job))
    with looking(job) as feed:
        batches = list(islice(feed, 1 + TRIED))
    list(steps(run, batches[:1]))
    begun = clock()
    count = len(list(steps(run, batches[1:] or batches)))
    return max(int(seconds * count / (clock() - begun)), 1)
