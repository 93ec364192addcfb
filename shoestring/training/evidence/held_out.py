"""Rehearse the validation: one pass over the largest held-out batch, and the total amount of held-out data.

It runs the very code that validates in training, so its memory is exact too. A metric that reads values which depend on
weights (`item()`) is followed up to that point, and the log says so. The job's own `validate` may do anything, so only
the memory standing before it is rehearsed; what it allocates is measured in a real run, where there is one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from shoestring.core.batch import Batch, tensors, to_device
from shoestring.core.errors import Mistake, error_sentence
from shoestring.core.job import Job
from shoestring.core.running.run import Run
from shoestring.core.user_code.seams import calls_user
from shoestring.data.elements import ByIdentity
from shoestring.measure.holdings import Holders
from shoestring.measure.timeline import validation
from shoestring.measure.tracker import VALIDATE, Log, StorageEvent, Tracker, hold_run, report_visits
from shoestring.training.validation import (
    SilentObserver,
    batch_metrics,
    check_goal,
    once_through,
    validating,
    validation_feed,
)

LONGEST = 5.0  # seconds to spend looking through held-out data
OWN = "validate=... may do anything, so only a real run of it tells"


class Watching(SilentObserver):
    """Tracks a validation, and of its batches only those that are larger than all before. `also` returns the last
    step's batch and its loss, which are in memory meanwhile."""

    def __init__(
        self, run: Run, tracker: Tracker, holders: Holders, also: Callable[[], tuple[Batch, Any]] = lambda: (None, None)
    ) -> None:
        self.run, self.tracker, self.holders, self.also = run, tracker, holders, also
        self.begun, self.largest = False, -1  # largest: bytes of the largest batch so far

    @contextmanager
    def around(self) -> Iterator[None]:
        with self.tracker:
            if not self.begun:
                self.begun = True
                self.tracker.look(self.hold_all)
            self.mark(VALIDATE)
            yield
            self.mark("")

    def hold_all(self) -> None:
        """Count what was allocated while the tracker was off."""
        hold_run(self.run, self.tracker)
        batch, loss = self.also()
        if not self.tracker.alive(
            "inputs"
        ):  # a data source that keeps its batches still has those of the first steps, which count
            self.tracker.hold(tensors(batch), "inputs")
        self.tracker.hold(tensors(loss))
        self.tracker.hold_new(self.holders.find(self.run))

    def mark(self, phase: str, block: str = "") -> None:
        self.tracker.look(self.tracker.mark, phase, block)

    @contextmanager
    def batch(self, batch: Batch) -> Iterator[None]:
        size = size_of(batch)
        if size <= self.largest:
            yield
            return
        self.largest = size
        told = report_visits(
            self.run,
            lambda name: self.mark(VALIDATE, name),
            lambda name, output: self.mark(VALIDATE, f"(after {name})"),
        )
        with told, self.tracker, self.tracker.holding(tensors(batch), "inputs"):
            self.mark(VALIDATE, "(start)")
            yield
            self.mark("")


def size_of(batch: Batch) -> int:
    """Bytes of a batch; of a sharded one, those of the part."""
    return sum(one.nbytes for one in tensors(batch) if one.layout is torch.strided)


@dataclass(frozen=True)
class HeldOut:
    """What a look through the held-out data found."""

    largest: Batch
    counts: bool  # whether this worker validates the batch, or only holds it
    all: float  # bytes of all batches / bytes of the largest
    batches: int  # number of batches looked at
    ended: bool  # whether those were all
    seconds: float  # to make and fetch all of them


@dataclass(frozen=True)
class HeldOutSource:
    """The job and the settings from which held-out batches are made, for one look through them."""

    data: ByIdentity
    size: int
    collate: ByIdentity
    seed: int
    split: ByIdentity
    rank: int
    world: int
    job: Job = field(compare=False)


def looked_through(job: Job, whole: bool = False) -> HeldOut:
    """The largest held-out batch (in a group, this worker's part of it), and the total amount."""
    link = job.mesh.along("data")
    place = (0, 1) if whole else (link.rank, link.world)
    return look(
        HeldOutSource(
            ByIdentity(job.held_out), job.batch, ByIdentity(job.collate), job.seed, ByIdentity(job.split), *place, job
        )
    )


@lru_cache(4)
def look(source: HeldOutSource) -> HeldOut:
    begun, largest, counts, most, total, number = time.monotonic(), None, False, -1, 0, 0
    feed = validation_feed(source.job, source.world == 1)
    for batch, own in once_through(feed):
        size, number = size_of(batch), number + 1
        total += size
        if size > most:
            largest, counts, most = batch, own, size
        spent = time.monotonic() - begun
        if spent > LONGEST:
            rest = max(feed.per_epoch - number, 0)  # if the data tell their length
            return HeldOut(
                largest,
                counts,
                (total + rest * total / number) / max(most, 1),
                number,
                False,
                spent * (1 + rest / number),
            )
    if not number:
        raise Mistake("the job's held_out data yield no batch: there is nothing to validate on")
    return HeldOut(
        largest, counts, max(total / most, 1.0) if most > 0 else float(number), number, True, time.monotonic() - begun
    )


def without_validation(job: Job) -> Job:
    """The same job without validation, for rehearsals that need only the step."""
    return replace(job, held_out=None, metrics=None, validate=None, patience=0)


@calls_user("weight")
def rehearse_validation(run: Run, job: Job, tracker: Tracker, holders: Holders, last: Batch) -> None:
    """Validate once on the largest held-out batch, under the tracker. `last`: the batch of the last step."""
    if not job.validates or not run.team.assignment.counts_steps:
        return
    watch = Watching(run, tracker, holders, lambda: (last, None))
    if job.validate is not None:
        tracker.log.unvalidated = OWN
        with validating(run, job, watch):
            return
    found = looked_through(job, run.team.assignment.asynchronous)
    float(job.weight(found.largest))
    device = next(run.model.parameters()).device
    names: list[str] = []
    with validating(run, job, watch), watch.batch(found.largest):
        try:
            names = list(batch_metrics(run, job, to_device(found.largest, device)))
        except Mistake:
            raise
        except (
            Exception
        ) as error:  # training itself ran on fake tensors, or this would not be reached; a metric may not
            if tracker.stage is None:
                raise
            tracker.log.unvalidated = error_sentence(error)
    if names:
        check_goal(job, names)


def own_validation(log: Log) -> int:
    """The most bytes of tensors that the job's own validation allocated."""
    found = validation(log)
    return max(stretch.top for stretch in found) - found[0].end if found else 0


def with_own(log: Log, size: int) -> Log:
    """The log of a rehearsal in which the job's own validation allocates `size` bytes of tensors."""
    place = next((number for number, (_, moment) in enumerate(log.marks) if moment.phase == VALIDATE), None)
    if place is None or not size:
        return log
    position, serial = log.marks[place + 1][0], 1 + max((event.storage for event in log.events), default=0)
    made = [StorageEvent(serial, size), StorageEvent(serial, -size)]
    marks = [
        (where + len(made) if number > place else where, moment) for number, (where, moment) in enumerate(log.marks)
    ]
    return replace(log, events=[*log.events[:position], *made, *log.events[position:]], marks=marks, unvalidated="")
