"""The feed: a job's batches, from any position on.

Data draw from a random stream of their own, so going through them again gives the same batches whatever the model has drawn in
between (dropout), and a run that was stopped can go on where it was:

    data with state_dict and load_state_dict    from that state, at once
    a map-style Dataset                         from the position, at once: its order follows from the seed
    any other iterable                          fast-forwarded: its first batches are fetched and dropped

Data that can be gone through again go round: an epoch is one round of them. An iterator can't, and where it ends the run ends too, unless
the job asks for several epochs: then its factory is called again.

In a group every worker gets its own samples of each batch, and all samples of it are somebody's. Of a Dataset only those are fetched;
what is drawn on the way (augmentation) follows from the seed, the batch and the part of it. Which part is a worker's next, its run's
assignment says; which samples of a Dataset make a batch, the job's sampler.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch.utils.data import DataLoader

from shoestring.core import random_state
from shoestring.core.assignment import Assignment, own_part
from shoestring.core.batch import Batch, piece_bounds
from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.core.random_state import RandomStream
from shoestring.core.schedule import UNKNOWN_STEPS, takes_steps
from shoestring.data.samplers import Shuffled

END = object()       # where data have no more
APART = 0x9E3779B9   # added to the seed, so that data and model do not draw the same numbers


class Feed:
    """An iterator over a job's batches that knows its position. Whoever trains a run gives that run's assignment."""

    def __init__(self, job: Job, assignment: Assignment | None = None, data: Callable[[], Any] | None = None) -> None:
        """`data` are others than those that the job trains on, such as held-out ones."""
        self.job, self.assignment, self.factory = job, assignment or own_part(job.mesh), data or job.data
        self.grouped = job.mesh.along("data").world > 1   # batches are divided between workers
        self.sampler = job.sampler or Shuffled()
        self.taken = 0                 # batches that were given so far,
        self.in_round = 0              # and in this round
        self.epoch = 0                 # rounds that were over when the last batch was given
        self.round_over = False        # that batch was the last of its round
        self.ended = False             # there are no more
        self.random_stream = RandomStream((job.seed + APART) % 2**32)
        with self.random_stream.drawing():
            self.data = self.factory() if callable(self.factory) else self.factory
        self.stateful = hasattr(self.data, "state_dict") and hasattr(self.data, "load_state_dict")
        self.mapped = (hasattr(self.data, "__getitem__") and hasattr(self.data, "__len__")
                       and not isinstance(self.data, (list, tuple)) and not self.stateful)
        if job.sampler is not None and not self.mapped:
            raise Mistake(f"the job has a sampler and its data are a {type(self.data).__name__}, of which samples can't be chosen by "
                          f"number: give a map-style Dataset, or leave the sampler out")
        self.source: Iterator[Any] | None = None   # of batches; of a Dataset, of the numbers of their samples
        self.whole: Any = None                     # what it gave last
        self.chosen: list[int] = []                # samples to fetch next
        # Where data do not say how many batches they have, and somebody counts rounds: the batch after the last one, and the state of the
        # random stream before it was fetched
        self.ahead: tuple[Any, Any] | None = None

    @cached_property
    def per_epoch(self) -> int:
        """Batches in a round; 0: the data do not say."""
        if self.mapped:
            return self.sampler.per_epoch(len(self.data), self.job.batch)
        try:
            return len(self.data)
        except (TypeError, NotImplementedError):
            return 0

    @property
    def epochs(self) -> int:
        """Rounds that are over."""
        return self.epoch + self.round_over

    @property
    def steps_in_all(self) -> int:
        """Steps that the job takes; 0: nobody knows before its data end."""
        rounds = self.job.epochs * self.per_epoch
        return min(filter(None, (self.job.steps, rounds)), default=0) if self.per_epoch else self.job.steps * (not self.job.epochs)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return self.part(*self.assignment.next(self))

    def part(self, number: int, part: int | None) -> Batch:
        """A part of the batch with this number, which is not before the last one; None: of nothing, only to stand there."""
        if self.mapped and self.grouped:
            self.random_stream = RandomStream(hash((self.job.seed, number, part or 0)) % 2**32)
        with self.random_stream.drawing():
            while self.taken <= number:
                self.whole = self.next_chosen() if self.mapped else self.next_whole()
                self.taken += 1
            if part is None:
                return None
            if self.mapped:
                begin, end = self.bounds(len(self.whole), part)
                self.chosen = self.whole[begin:end]
                return next(self.fetched)
        return self.own(self.whole, part) if self.grouped else self.whole

    def next_chosen(self) -> list[int]:
        """The numbers of the samples of a Dataset that make the next batch. There is always another."""
        if self.source is None:
            self.source = self.chosen_samples(0)
        chosen: list[int] = next(self.source)
        self.epoch, place = divmod(self.taken, max(self.per_epoch, 1))
        self.in_round = place + 1
        self.round_over = self.in_round == self.per_epoch
        return chosen

    def next_whole(self) -> Batch:
        """The next batch, of this round or of the next one. Raises StopIteration where there are no more."""
        if self.source is None:
            self.source = iter(self.data)
        if self.ahead is not None:
            (batch, _), self.ahead = self.ahead, None
        else:
            batch = next(self.source, END)
        if batch is END:   # also where data said that they have fewer batches: those that are there count
            self.begin_round()
            assert self.source is not None, "a round has begun"
            batch = next(self.source, END)
            if batch is END:
                self.ended = True
                raise StopIteration
        self.in_round += 1
        self.round_over = self.in_round == self.per_epoch
        if not self.per_epoch and self.job.counts_epochs and not self.stateful:
            before = random_state.state()
            self.ahead = (next(self.source, END), before)
            self.round_over = self.ahead[0] is END
        return batch

    def begin_round(self) -> None:
        """Go through the data once more, if they can be. Raises StopIteration if not."""
        if self.source is self.data:   # an iterator
            if self.epoch + 1 >= self.job.epochs:
                self.ended = True
                raise StopIteration
            self.data = self.factory()
        self.source = iter(self.data)
        self.epoch, self.in_round = self.epoch + 1, 0

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
        return iter(DataLoader(self.data, batch_sampler=iter(lambda: self.chosen, None), collate_fn=self.job.collate, generator=own))

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
        return {"taken": self.taken, "data": self.data.state_dict() if self.stateful else None,
                "chance": self.random_stream.state if self.ahead is None else self.ahead[1],
                "round": [self.epoch, self.in_round, self.round_over]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.stateful and state["data"] is not None:
            with self.random_stream.drawing():
                self.data.load_state_dict(state["data"])
                if state["taken"]:   # what beginning draws was drawn before the state was taken
                    self.source = iter(self.data)
            self.epoch, self.in_round, self.round_over = state.get("round", [0, state["taken"], False])
        elif self.mapped:
            self.source = self.chosen_samples(state["taken"])
            if state["taken"]:
                self.epoch, place = divmod(state["taken"] - 1, max(self.per_epoch, 1))
                self.in_round, self.round_over = place + 1, place + 1 == self.per_epoch
        elif state["taken"]:
            try:
                self.part(state["taken"] - 1, None)
            except StopIteration:
                raise Mistake(f"the job's data end after {self.taken} batches and the run had taken {state['taken']}: "
                              f"give the data it was begun with") from None
        self.taken = state["taken"]
        if self.ahead is None:   # else the stream stands behind the batch that was fetched ahead, as it did then
            self.random_stream.state = state["chance"]


def counted(job: Job) -> Job:
    """The job with its steps in all, as far as its data tell how many make an epoch."""
    steps = Feed(job).steps_in_all if job.epochs else 0
    if job.epochs and not steps and takes_steps(job):
        raise Mistake(UNKNOWN_STEPS)
    return replace(job, steps=steps) if steps else job


def shortened(job: Job, steps: int) -> Job:
    """The job's first steps, to try something: its schedule is what it is in the whole of it."""
    made = job.schedule
    if made is not None and takes_steps(job):
        whole = counted(job).steps
        job = replace(job, schedule=lambda optimizer: made(optimizer, whole))
    return replace(job, steps=steps, epochs=0)
