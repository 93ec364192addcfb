"""Validation: measure the model on held-out data, without side effects: no gradient, no random number drawn, and the
model's state (buffers, attributes, its own generators, the mode of every module) is restored.

Metrics are means weighted by batch weight, so a group, in which every worker has its part of every batch, gets the same
result as one process; if workers do not wait for each other, the one that counts steps validates whole batches. The
model is called through `OutsideSteps.together`, outside of a step, wherever a technique keeps its weights and in their
precision.

Contract: Trained weights have the same bits with validation and without it
(tests/training/test_validation.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from types import CellType, FunctionType
from typing import Any

import torch

from shoestring.core.batch import Batch, to_device
from shoestring.core.errors import Mistake
from shoestring.core.job import Job, target
from shoestring.core.running import random_state
from shoestring.core.running.run import Run
from shoestring.core.running.run_weights import guard_outside, stored_weights
from shoestring.core.user_code.seams import calls_user
from shoestring.core.user_code.user_functions import value_text
from shoestring.core.workers.assignment import own_part
from shoestring.core.workers.mesh import on_one_axis
from shoestring.data.elements import held_out_feed
from shoestring.data.feed import Feed
from shoestring.data.samplers import InOrder
from shoestring.training.memory.recompute.block_state import (
    GENERATORS,
    BlockState,
    Frozen,
    FrozenGenerator,
    generators_of,
    put_back,
    version,
)
from shoestring.training.memory.recompute.fingerprint import fingerprint, matches

LOSS = "loss"  # the metric that always exists
NO_GRADIENT = "does not require grad and does not have a grad_fn"  # torch's message when derivatives are unavailable
OURS = ("step", "epoch")  # names reported beside the metrics

Metrics = dict[str, float]


class SilentObserver:
    """The default observer of a validation: does nothing."""

    def around(self) -> AbstractContextManager[object]:
        """Around all batches, or all of the job's own validation."""
        return nullcontext()

    def batch(self, batch: Batch) -> AbstractContextManager[object]:
        """Around one batch."""
        return nullcontext()


class NoGoal(Mistake):
    """The job's goal is not among the metrics."""


def validation_feed(job: Job, whole: bool = False) -> Feed:
    """One pass over the held-out batches: this worker's part of each, or each `whole`. The job's data are made anew."""
    assert job.held_out is not None, "the caller has checked this"
    mesh = on_one_axis() if whole else job.mesh
    once = replace(job, sampler=None, epochs=1, metrics=None, patience=0, mesh=mesh)
    feed = held_out_feed(once, own_part(mesh))
    feed.sampler = InOrder()  # every sample, including those that do not fill a batch
    return feed


def once_through(feed: Feed) -> Iterator[tuple[Batch, bool]]:
    """The batches of one round, each with whether it is this worker's; stops where the data would start over."""
    for batch in feed:
        if feed.epoch:
            return
        yield batch, not feed.assignment.idle
        if feed.round_over:
            return


@calls_user("validate")
def run_validation(
    run: Run, job: Job, watch: SilentObserver | None = None, batches: Iterable[tuple[Batch, bool]] | None = None
) -> Metrics:
    """The metrics of the model as it is now, over all held-out batches, or over these."""
    watch = watch or SilentObserver()
    with validating(run, job, watch):
        if job.validate is not None:
            with watch.around(), guard_outside(run):
                found = metrics_by_name(job.validate(run.model), "validate")
            return dict(
                run.team.objects(found)[0]
            )  # all workers computed it; where it draws or reads a clock, the first worker's result counts
        return means(
            run,
            job,
            once_through(validation_feed(job, run.team.assignment.asynchronous)) if batches is None else batches,
            watch,
        )


@contextmanager
def validating(run: Run, job: Job, watch: SilentObserver) -> Iterator[None]:
    """While inside, the model is in evaluation mode and can be called; afterwards its state is restored."""
    run.optimizer.zero_grad(set_to_none=True)  # frees the gradients' memory for validation
    with random_state.fork_rng(), ExitStack() as stack:
        with watch.around():
            stack.enter_context(restoring_state(run))
            stack.enter_context(torch.no_grad())
            # The job's own validation may call the model any number of times, so all weights are made available
            stack.enter_context(run.outside.used_by_all() if job.validate is None else run.outside.usable())
        random_state.seed(job.seed)
        try:
            yield
        finally:
            with watch.around():
                stack.close()


@contextmanager
@calls_user("model")
def restoring_state(run: Run) -> Iterator[None]:
    """While inside, every module is in evaluation mode; afterwards the model's state is restored."""
    # Asynchronous workers change shared weights and statistics meanwhile: then only generators are restored
    shared, modes = run.team.assignment.asynchronous, {module: module.training for module in run.model.modules()}
    before: list[Frozen] = [*generators_of(run.model)] if shared else BlockState(run.model).picture()
    before += map(FrozenGenerator, generators_beside(run))
    elsewhere = stored_weights(run)
    weights = (
        {}
        if shared
        else {
            name: (one, version(one), fingerprint(one))
            for name, one in run.model.named_parameters()
            if name not in elsewhere and one.device.type == "cpu"
        }
    )
    run.model.eval()
    try:
        yield
    finally:
        run.model.train(modes[run.model])  # by the model's own method, which may do more than set a mode,
        for module, mode in modes.items():
            module.training = mode  # and then every module's own mode
        try:
            put_back(before)
        except Mistake as error:
            raise Mistake(
                f"validation would leave something behind: in evaluation {str(error).partition(', so ')[0]}; keep that tensor "
                f"as a buffer, or leave it alone while the model is in the mode for evaluation"
            ) from error
        changed = [
            name for name, (one, then, bits) in weights.items() if version(one) != then or not matches(bits, one)
        ]
        if changed:
            raise Mistake(
                f"the model changes its weight {changed[0]} in evaluation too, so that validation would change what is trained: "
                f"do that in training alone (if self.training: ...)"
            )


def generators_beside(run: Run) -> Iterator[Any]:
    """Random generators that a model's code refers to: in its file, or in the closures of its functions."""
    places: dict[int, list[Any]] = {}
    for code in (
        run.outside.evaluate,
        *{type(module): type(module).forward for module in run.model.modules()}.values(),
    ):
        if isinstance(code, FunctionType) and not str(code.__module__).startswith(
            "torch."
        ):  # a class made at run time has no module
            places[id(code.__globals__)] = list(code.__globals__.values())
            places[id(code)] = [content for cell in code.__closure__ or () for content in content_of(cell)]
    found = {id(one): one for place in places.values() for one in place if isinstance(one, GENERATORS)}
    return iter(found.values())


def content_of(cell: CellType) -> list[Any]:
    """The content of a closure's cell; empty if it has no value yet."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


@calls_user("weight")
def means(run: Run, job: Job, batches: Iterable[tuple[Batch, bool]], watch: SilentObserver) -> Metrics:
    """Means over all batches and all workers, weighted by batch weight."""
    totals: dict[str, tuple[float, float]] = {}  # metric -> sum of value x weight, sum of weight
    device = next(run.model.parameters()).device
    for batch, counts in batches:
        weight = float(job.weight(batch)) if counts else 0.0
        with watch.batch(batch):
            found = metrics_by_name(batch_metrics(run, job, to_device(batch, device)), "metrics")
        for name, value in found.items():
            total, whole = totals.get(name, (0.0, 0.0))
            totals[name] = (total + weight * value if weight else total, whole + weight)
    whole_totals: dict[str, tuple[float, float]] = {}
    for told in (
        run.team.objects(totals) if not run.team.link.imagined else [totals]
    ):  # in the order of workers, so that all get the same result
        for name, (total, weight) in told.items():
            before = whole_totals.get(name, (0.0, 0.0))
            whole_totals[name] = (before[0] + total, before[1] + weight)
    if not any(weight for _, weight in whole_totals.values()):
        raise Mistake("the job's held_out data yield no batch with a sample: there is nothing to validate on")
    return {name: total / weight if weight else math.nan for name, (total, weight) in whole_totals.items()}


def batch_metrics(run: Run, job: Job, batch: Batch) -> Mapping[str, Any]:
    """The metrics of one batch, as the job computes them."""
    with guard_outside(run):
        return raw_batch_metrics(run, job, batch)


@calls_user("model, loss or metrics")
def raw_batch_metrics(run: Run, job: Job, batch: Batch) -> Mapping[str, Any]:
    try:
        output = run.outside.evaluate(run.model, batch)
    except RuntimeError as error:
        if NO_GRADIENT not in str(error):
            raise
        raise Mistake(
            "the job's forward computes derivatives, and validation has none ready: put `with torch.enable_grad():` around what "
            "takes them"
        ) from error
    found: dict[str, Any] = {LOSS: job.loss(output, batch)}
    if job.metrics is not None:
        more = job.metrics(output, batch)
        check_names(more, "metrics")
        if LOSS in more:
            raise Mistake(
                "the job's metrics give 'loss', which is the held-out loss and always measured: give it another name"
            )
        found |= more
    return found


@calls_user("metrics")
def check_names(found: Any, what: str) -> None:
    """Refuse results that are not numbers by name, or use one of our names."""
    if not isinstance(found, Mapping):
        raise Mistake(
            f"the job's {what} gave {value_text(found)}: it must give numbers by name, such as {{'accuracy': 0.9}}"
        )
    taken = [name for name in found if name in OURS]
    if taken:
        raise Mistake(
            f"the job's {what} gave {taken[0]!r}, which stands beside every metric already: give it another name"
        )


def check_goal(job: Job, names: Iterable[str]) -> None:
    """Refuse a goal that is not measured."""
    there = list(names)
    if target(job.goal).metric not in there:
        raise NoGoal(
            f"goal={job.goal!r} in the Job, and validation gave {', '.join(there) or 'nothing'}: name one of them"
        )


@calls_user("metrics")
def metrics_by_name(found: Any, what: str) -> Metrics:
    """Metrics as numbers by name."""
    check_names(found, what)
    numbers = {}
    for name, value in found.items():
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise Mistake(
                f"the job's {what} gave {value_text(value)} as {name!r}: it must be one number, the mean over the batch"
            ) from error
    return numbers
