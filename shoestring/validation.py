"""Validation: how good the model is on data that it is not trained on. It leaves nothing behind: no gradient, no random number drawn, every
module in the mode it was in.

Metrics are means by the weight of their batches, so that a group, in which every worker has its part of every batch, finds what one
process does. The model is called as `Run.usable` has it: outside of a step, with its weights wherever a technique keeps them.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shoestring.core import random_state
from shoestring.core.assignment import own_part
from shoestring.core.batch import Batch, moved
from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.core.run import Run
from shoestring.data.feed import Feed

LOSS = "loss"   # the metric that is always there


def held_out(job: Job) -> Feed:
    """The held-out batches, this worker's part of each, once through."""
    assert job.held_out is not None, "who asks has looked"
    once = replace(job, sampler=None, epochs=1, held_out=None, metrics=None, patience=0)
    return Feed(once, own_part(job.mesh), job.held_out)


def validated(run: Run, job: Job) -> dict[str, float]:
    """The metrics of the model as it is now."""
    run.optimizer.zero_grad(set_to_none=True)   # the memory of gradients is free for this
    with random_state.kept(), evaluating(run.model), torch.no_grad(), run.usable():
        random_state.seed(job.seed)
        if job.validate is not None:
            return named(job.validate(run.model), "validate")
        return means(run, job, held_out(job))


def means(run: Run, job: Job, batches: Feed) -> dict[str, float]:
    """Means over all batches, and all workers, by the batches' weight."""
    totals: dict[str, float] = {}
    whole, device = 0.0, next(run.model.parameters()).device
    for batch in batches:
        weight = 0.0 if batches.assignment.idle else float(job.weight(batch))
        for name, value in measured(run, job, moved(batch, device)).items():
            totals[name] = totals.get(name, 0.0) + (weight * value if weight else 0.0)
        whole += weight
        if batches.round_over:
            break
    if run.link.world > 1 and not run.link.imagined and not run.assignment.asynchronous:
        told = torch.tensor([whole, *totals.values()], dtype=torch.float64)
        run.link.sum(told).wait()
        whole, totals = float(told[0]), dict(zip(totals, told[1:].tolist(), strict=True))
    if not whole:
        raise Mistake("the job's held_out data yield no batch: there is nothing to validate on")
    return {name: total / whole for name, total in totals.items()}


def measured(run: Run, job: Job, batch: Batch) -> dict[str, float]:
    """The metrics of one batch."""
    output = job.forward(run.model, batch)
    found = {LOSS: job.loss(output, batch)}
    if job.metrics is not None:
        found |= job.metrics(output, batch)
    return named(found, "metrics")


def named(found: Any, what: str) -> dict[str, float]:
    """Metrics as numbers by name."""
    if not isinstance(found, Mapping):
        raise Mistake(f"the job's {what} gave a {type(found).__name__}: it must give numbers by name, such as {{'accuracy': 0.9}}")
    try:
        return {str(name): float(value) for name, value in found.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        raise Mistake(f"the job's {what} gave something that is not one number: {error}") from error


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """While inside, every module is in the mode for evaluation; then in its own again."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
