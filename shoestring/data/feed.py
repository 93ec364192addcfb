"""The feed: a job's batches, from any position on.

Data draw from a random stream of their own, so going through them again gives the same batches whatever the model has drawn in
between (dropout), and a run that was stopped can go on where it was:

    data with state_dict and load_state_dict    from that state, at once
    a map-style Dataset                         from the position, at once: its order follows from the seed
    any other iterable                          fast-forwarded: its first batches are fetched and dropped

In a group every worker gets its own samples of each batch, and all samples of it are somebody's. Of a Dataset only those are fetched;
what is drawn on the way (augmentation) follows from the seed, the batch and the part of it. Which part is a worker's next, its run's
assignment says; which samples of a Dataset make a batch, the job's sampler.
"""
from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch.utils.data import DataLoader

from shoestring.core.assignment import Assignment, own_part
from shoestring.core.batch import Batch, piece_bounds
from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.core.random_state import RandomStream
from shoestring.data.samplers import Shuffled

APART = 0x9E3779B9   # added to the seed, so that data and model do not draw the same numbers


class Feed:
    """An iterator over a job's batches that knows its position. Whoever trains a run gives that run's assignment."""

    def __init__(self, job: Job, assignment: Assignment | None = None) -> None:
        self.job, self.assignment = job, assignment or own_part(job.mesh)
        self.grouped = job.mesh.along("data").world > 1   # batches are divided between workers
        self.sampler = job.sampler or Shuffled()
        self.taken = 0
        self.random_stream = RandomStream((job.seed + APART) % 2**32)
        with self.random_stream.drawing():
            self.data = job.data() if callable(job.data) else job.data
        self.stateful = hasattr(self.data, "state_dict") and hasattr(self.data, "load_state_dict")
        self.mapped = (hasattr(self.data, "__getitem__") and hasattr(self.data, "__len__")
                       and not isinstance(self.data, (list, tuple)) and not self.stateful)
        if job.sampler is not None and not self.mapped:
            raise Mistake(f"the job has a sampler and its data are a {type(self.data).__name__}, of which samples can't be chosen by "
                          f"number: give a map-style Dataset, or leave the sampler out")
        self.source: Iterator[Any] | None = None   # of batches; of a Dataset, of the numbers of their samples
        self.whole: Any = None                     # what it gave last
        self.chosen: list[int] = []                # samples to fetch next

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return self.part(*self.assignment.next(self))

    def part(self, number: int, part: int | None) -> Batch:
        """A part of the batch with this number, which is not before the last one; None: of nothing, only to stand there."""
        if self.mapped and self.grouped:
            self.random_stream = RandomStream(hash((self.job.seed, number, part or 0)) % 2**32)
        with self.random_stream.drawing():
            if self.source is None:
                self.source = self.chosen_samples(0) if self.mapped else iter(self.data)
            while self.taken <= number:
                self.whole = next(self.source)
                self.taken += 1
            if part is None:
                return None
            if self.mapped:
                begin, end = self.bounds(len(self.whole), part)
                self.chosen = self.whole[begin:end]
                return next(self.fetched)
        return self.own(self.whole, part) if self.grouped else self.whole

    def bounds(self, count: int, part: int) -> tuple[int, int]:
        """Where a part of so many samples begins and ends. A worker that gets none takes part with one that does not count."""
        self.assignment.idle = part >= count
        return piece_bounds(count, min(self.assignment.parts, count))[0 if self.assignment.idle else part]

    def own(self, batch: Batch, part: int) -> Batch:
        """A part of a batch. A worker that gets no sample takes part with one that does not count."""
        count = self.job.count(batch)
        if not count:
            raise Mistake(f"batch {self.taken} of the job's data has no samples: there is nothing for {self.assignment.parts} workers to "
                          f"train on; leave it out of the data")
        self.assignment.idle = part >= count
        return self.job.pieces(batch, min(self.assignment.parts, count))[0 if self.assignment.idle else part]

    @cached_property
    def fetched(self) -> Iterator[Batch]:
        """Batches of the samples that are chosen."""
        # A loader draws a seed for its workers. Not from the data's stream: going on would draw it once more.
        own = torch.Generator().manual_seed(self.job.seed)
        return iter(DataLoader(self.data, batch_sampler=iter(lambda: self.chosen, None), generator=own))

    def chosen_samples(self, begin: int) -> Iterator[list[int]]:
        """Of every batch of a Dataset, from number `begin` on, its samples' numbers."""
        count, size, parts = len(self.data), self.job.batch, self.assignment.parts
        if reason := self.sampler.refusal(count, size):
            raise Mistake(reason)
        if self.sampler.fills_batches and size < parts:
            raise Mistake(f"batches of {size} samples for {parts} workers: some would have none; "
                          f"give a batch of {parts} samples or more, or fewer --devices")
        yield from self.sampler.batches(count, size, self.job.seed, begin)

    @property
    def how(self) -> str:
        """How it goes to a position, for the user."""
        if self.stateful:
            return "the data resume from their own state"
        return "the data set resumes at its position" if self.mapped else "the data are fast-forwarded, batch by batch"

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken, "data": self.data.state_dict() if self.stateful else None, "chance": self.random_stream.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.stateful and state["data"] is not None:
            with self.random_stream.drawing():
                self.data.load_state_dict(state["data"])
                if state["taken"]:   # what beginning draws was drawn before the state was taken
                    self.source = iter(self.data)
        elif self.mapped:
            self.source = self.chosen_samples(state["taken"])
        elif state["taken"]:
            try:
                self.part(state["taken"] - 1, None)
            except StopIteration:
                raise Mistake(f"the job's data end after {self.taken} batches and the run had taken {state['taken']}: "
                              f"give the data it was begun with") from None
        self.taken, self.random_stream.state = state["taken"], state["chance"]
