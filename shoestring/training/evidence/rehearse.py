"""A rehearsal: the same training loop with the same techniques applied, on fake tensors under the tracker.

The predicted peak is exact because the program is the same. What can't run on fake tensors runs on real ones, and the
plan says so.

Contract: A rehearsal invents no value: code that looks at one is planned from real steps
(tests/training/evidence/test_rehearse.py). Training begins from `seed` after the model was made from `seed`, so a
rehearsal draws the same numbers (tests/training/test_honest.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shoestring.core.batch import Batch
from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.core.optimization.schedule import takes_steps, with_schedule
from shoestring.core.running import random_state
from shoestring.core.running.run import Run, plain_run
from shoestring.core.running.run_state import RunState
from shoestring.core.running.run_weights import bytes_stored, traffic
from shoestring.core.technique import applied, in_order
from shoestring.core.workers.assignment import Assignment
from shoestring.core.workers.mesh import on_one_axis
from shoestring.data.feed import with_step_count
from shoestring.data.lengths import data_begun, planned_batches, planned_feed
from shoestring.measure.blocks import blocks
from shoestring.measure.calls import as_calls, methods
from shoestring.measure.fake import Stage
from shoestring.measure.holdings import Holders, nothing
from shoestring.measure.tracker import Log, Tracker, watch_run
from shoestring.training.catalogue import CATALOGUE
from shoestring.training.evidence.as_found import as_found
from shoestring.training.evidence.held_out import rehearse_validation
from shoestring.training.loop import steps
from shoestring.training.memory.recompute.block_state import generators_of
from shoestring.training.technique import TrainingTechnique as Technique
from shoestring.training.technique import check_division

STEPS = 2  # optimizer state exists from the second step on


def rehearse(
    job: Job,
    techniques: Iterable[Technique],
    batches: Iterable[Batch] | None = None,
    model: nn.Module | None = None,
    on_device: bool = False,
) -> Log:
    """The log of steps of the job under these techniques, on fake tensors, with its largest batch if that is known,
    else its first.
    `on_device`: the model will be trained on a GPU, while data stay in host memory."""
    log, tossed = run_rehearsal(job, techniques, batches, model, on_device, faithful=False)
    return run_rehearsal(job, techniques, batches, model, on_device, faithful=True)[0] if tossed else log


def run_rehearsal(
    job: Job,
    techniques: Iterable[Technique],
    batches: Iterable[Batch] | None,
    model: nn.Module | None,
    on_device: bool,
    faithful: bool,
) -> tuple[Log, bool]:
    stage = Stage()
    stage.faithful = faithful
    with random_state.fork_rng(), as_found(job):
        random_state.seed(job.seed)
        actor = stage.copy(model) if model is not None else stage.model(job.model)
        random_state.seed(job.seed)
        log = track(job, techniques, actor, batches, stage, model, on_device)
    return log, stage.tossed


def track(
    job: Job,
    techniques: Iterable[Technique],
    model: nn.Module,
    batches: Iterable[Batch] | None = None,
    stage: Stage | None = None,
    original: nn.Module | None = None,
    on_device: bool = False,
) -> Log:
    """The log of the first steps of a model, fake (on a stage) or real; `original` is the model that it is a copy
    of."""
    tracker = Tracker(stage)
    techniques = tuple(techniques)
    with tracker:
        plain = build_run(job, techniques, model)
    if not techniques:
        tracker.log.traits |= plain.stepping().traits.union(*(kind.traits_of_run(plain) for kind in CATALOGUE))
    tracker.log.stored = bytes_stored(plain)
    generators = generators_of(model)
    before, sent = traffic(plain), plain.team.mesh.bytes_sent
    last: list[Batch] = []  # the batch of the last step: it stays in memory, as its loss does, until the next step
    with planned_data(job, plain.team.assignment, batches) as (source, held):
        holders = Holders(job, held, original, on_device)
        with tracker:
            run = watch_run(plain, tracker, holders)
        for _ in tracked_steps(run, islice(remember_last(source, last), STEPS), tracker):
            tracker.log.moved.append(traffic(run) - before)
            tracker.log.sent.append(run.team.mesh.bytes_sent - sent)
            before, sent = traffic(run), run.team.mesh.bytes_sent
        tracker.log.draws |= not all(
            one.same() for one in generators
        )  # the tracker sees what torch draws, and nothing else
        if last:
            rehearse_validation(run, job, tracker, holders, last[0])
    return tracker.log


@contextmanager
def planned_data(
    job: Job, assignment: Assignment | None = None, batches: Iterable[Batch] | None = None
) -> Iterator[tuple[Iterable[Batch], Callable[[], Iterable[object]]]]:
    """The batches of a rehearsal, and what their source keeps in memory; for the largest batches, what the job's data
    keep."""
    if batches is not None:
        yield batches, nothing
        return
    with ExitStack() as stack:
        feeds = [stack.enter_context(planned_feed(job, assignment))]
        if job.largest is not None:
            feeds.append(stack.enter_context(data_begun(replace(job, mesh=on_one_axis()))))
        yield feeds[0], lambda: [one for feed in feeds for one in feed.references()]


def remember_last(batches: Iterable[Batch], last: list[Batch]) -> Iterator[Batch]:
    """The batches; `last` holds the most recent one."""
    for batch in batches:
        last[:] = [batch]
        yield batch


def tracked_steps(run: Run, batches: Iterable[Batch], tracker: Tracker) -> Iterator[Tensor]:
    """Steps under the tracker. Making data is not part of the step: the tracker is off while a batch is fetched."""
    for batch in batches:
        with tracker:
            done = list(steps(run, [batch]))
        yield from done


def build_run(
    job: Job,
    techniques: Iterable[Technique],
    model: nn.Module,
    folder: Path | None = None,
    resumed: bool = False,
    tracked: bool = True,
) -> Run:
    """The job's run with the techniques applied in order; `folder` is for state that must survive a restart. Plain
    training that is not tracked needs no blocks, so the model is not inspected then."""
    model.train()
    if job.epochs and takes_steps(job):  # its schedule needs the number of steps
        job = with_step_count(job)
    techniques = in_order(techniques)
    plain = with_schedule(job, plain_run(job, model, blocks(model) if techniques or tracked else {}))
    plain = replace(
        plain,
        settings=replace(plain.settings, folder=folder, resumed=resumed),
        example=lambda: next(planned_batches(job, plain.team.assignment)),
    )
    check_division(techniques, plain)
    run = applied(techniques, plain)
    for name, part in run.state.items():
        if not isinstance(part, RunState):
            raise Mistake(
                f"the part {name!r} of the run's state is a {type(part).__name__}, which lacks the methods of run state: let its "
                f"class inherit from shoestring.core.running.run_state.RunState"
            )
    return with_method_calls(run) if any(map(methods, run.blocks.values())) else run


def with_method_calls(run: Run) -> Run:
    """The run whose blocks may be called by methods other than forward."""

    def forward(model: nn.Module, batch: Batch) -> Any:
        with as_calls(run.blocks.values()):
            return run.forward(model, batch)

    def calls() -> AbstractContextManager[None]:
        return as_calls(run.blocks.values())

    return replace(run, forward=forward, outside=run.outside.within(calls, calls))
