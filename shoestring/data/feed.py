"""The feed: a job's batches, from any position on.

Data draw from a random stream of their own, so another pass over them gives the same batches whatever the model has
drawn in between (dropout), and a stopped run can resume where it was:

    data with state_dict and load_state_dict    from that state, at once
    a map-style data set                        from the position, at once: its order follows from the seed
    a list or tuple of batches                  from the position, at once
    any other iterable                          fast-forwarded: its first batches are fetched and dropped

Data that can be iterated again start over, and an epoch is one round of them (rounds.py). Batches of a data set are
made from its samples (fetch.py); the job's sampler says from which.

In a group every worker gets its own samples of each batch, and every sample goes to one worker. From a data set only a
worker's own are fetched. The run's assignment says which part is a worker's next.

Contract: The n-th batch depends on the seed alone (tests/data/test_feed.py, decisions/006). An iterator that ends is a
state of its own, and data that can be gone through again go round (tests/data/test_whole_runs.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

from shoestring.core.batch import Batch
from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.core.optimization.schedule import UNKNOWN_STEPS, takes_steps
from shoestring.core.running.random_state import RandomStream
from shoestring.core.user_code.data_objects import generators_in, is_data
from shoestring.core.user_code.user_functions import value_text
from shoestring.core.workers.assignment import Assignment, OwnPart, own_part
from shoestring.core.workers.sums import cut_range
from shoestring.data.fetch import AHEAD, OF_SAMPLES, BatchRequest, Fetchers, SampleDataset
from shoestring.data.kinds import is_listed, is_mapped, loading_processes
from shoestring.data.rounds import Rounds
from shoestring.data.samplers import InOrder, Shuffled

CALLS_USER = "data"  # core/user_code/seams.py

NO_BATCH = "the job's data yields no batch: nothing to train on"
APART = 0x9E3779B9  # added to the seed, so that data and model do not draw the same numbers


class Feed:
    """An iterator over a job's batches that knows its position. Training passes the run's assignment."""

    def __init__(self, job: Job, assignment: Assignment | None = None, data: Callable[[], Any] | None = None) -> None:
        """`data` replaces the data that the job trains on, such as held-out data; a data set in it is read in order."""
        self.job, self.assignment, factory = job, assignment or own_part(job.mesh), job.data if data is None else data
        self.grouped = job.mesh.along("data").world > 1  # whether batches are divided between workers
        self.sampler = job.sampler if job.sampler is not None else Shuffled() if data is None else InOrder()
        self.taken = 0  # batches consumed so far
        self.random_stream = RandomStream((job.seed + APART) % 2**32)
        with self.random_stream.drawing():
            self.data = factory() if callable(factory) else factory
        if not is_data(self.data):
            raise Mistake(
                f"the job's data give {value_text(self.data)}: batches (a list, a DataLoader, an iterator) or a data set are needed"
            )
        samples = (
            is_listed(self.data) and job.collate is not None
        )  # whether it is a list of samples to make batches from
        self.mapped, self.listed = samples or is_mapped(self.data), is_listed(self.data) and not samples
        for name in ("sampler", "collate", "workers") if data is None and not self.mapped else ():
            given = getattr(job, name)
            if given is not None and not (name == "workers" and given == 0):
                raise Mistake(
                    f"the job has {name}= and its data are a {type(self.data).__name__}, which yields ready batches: give a "
                    f"map-style data set (an object with __len__ and __getitem__), or leave {name} out"
                )
        self.rounds = None if self.mapped or self.listed else Rounds(self.data, factory, job.epochs, job.counts_epochs)
        self.samples = SampleDataset(self.data, job.collate, job.seed)
        self.chosen: Iterator[list[int]] | None = None  # for a data set: the samples of every batch from here on
        self.whole: Any = None  # the last batch; for a data set, the numbers of its samples
        self.fetchers: Fetchers | None = None
        self.next_fetched: tuple[int, int] | None = (
            None  # (batch, part) that the fetching processes return next; None: they have not begun
        )

    @cached_property
    def length(self) -> int:
        """Batches per round of a data set or a list."""
        return self.sampler.per_epoch(len(self.data), self.job.batch) if self.mapped else len(self.data)

    @property
    def per_epoch(self) -> int:
        """Batches per round; 0: the data do not say."""
        return self.length if self.rounds is None else self.rounds.length

    @property
    def place(self) -> tuple[int, int]:
        """Rounds that were over when the last batch was returned, and batches returned in this one."""
        if self.rounds is not None:
            return self.rounds.epoch, self.rounds.in_round
        epoch, place = divmod(max(self.taken - 1, 0), max(self.length, 1))
        return epoch, place + 1 if self.taken else 0

    @property
    def epoch(self) -> int:
        return self.place[0]

    @property
    def in_round(self) -> int:
        return self.place[1]

    @property
    def round_over(self) -> bool:
        """Whether the last batch was the last of its round."""
        return self.rounds.round_over if self.rounds is not None else self.taken > 0 and self.in_round == self.length

    @property
    def epochs(self) -> int:
        """Number of rounds that are over."""
        return self.epoch + self.round_over

    @property
    def ended(self) -> bool:
        """Whether there are no more batches."""
        return self.rounds.ended if self.rounds is not None else self.listed and not self.data

    @property
    def steps_in_all(self) -> int:
        """Steps that the job takes; 0: unknown until its data end."""
        rounds = self.job.epochs * self.per_epoch
        return (
            min(filter(None, (self.job.steps, rounds)), default=0)
            if self.per_epoch
            else self.job.steps * (not self.job.epochs)
        )

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return self.part(*self.assignment.next(self))

    def part(self, number: int, part: int | None) -> Batch:
        """A part of the batch with this number, which is not before the last one; for None only the position moves."""
        with self.random_stream.drawing():
            while self.taken <= number:
                self.whole = self.next_whole()
                self.taken += 1
        if part is None:
            return None
        if self.mapped:
            return self.fetch_part(number, part)
        return self.own(self.whole, part) if self.grouped else self.whole

    def next_whole(self) -> Any:
        """The next batch; for a data set, which always has another, the numbers of its samples."""
        if self.rounds is not None:
            return self.rounds.next()
        if self.listed:
            if not self.data:
                raise StopIteration
            return self.data[self.taken % len(self.data)]
        if self.chosen is None:
            self.chosen = self.chosen_samples(self.taken)
        return next(self.chosen)

    def fetch_part(self, number: int, part: int) -> Batch:
        """A part of the batch whose samples are known."""
        self.assignment.idle = part >= len(self.whole)
        if self.fetchers is not None and self.next_fetched is None and type(self.assignment) is OwnPart:
            self.fetchers.begin(self.requests_from(number, part))
            self.next_fetched = number, part
        if self.fetchers is not None and self.next_fetched == (number, part):
            self.next_fetched = number + 1, part
            return self.fetchers.next()
        return self.samples.fetch(self.batch_request(number, part, self.whole))

    def batch_request(self, number: int, part: int, chosen: list[int]) -> BatchRequest:
        """A part of a batch by its samples. A worker without any takes a sample that does not count."""
        begin, end = cut_range(0, len(chosen), min(self.assignment.parts, len(chosen)))[
            part if part < len(chosen) else 0
        ]
        return BatchRequest(number, part, number // max(self.length, 1), chosen[begin:end])

    def requests_from(self, begin: int, part: int) -> Iterator[BatchRequest]:
        for number, chosen in enumerate(self.chosen_samples(begin), begin):
            yield self.batch_request(number, part, chosen)

    def references(self) -> tuple[object, ...]:
        """Everything it keeps besides the last returned part: the data, an iterator over them, a batch fetched ahead,
        and the whole of a batch that workers share."""
        rounds = self.rounds
        iterator = (rounds.source, rounds.data, rounds.ahead and rounds.ahead.batch) if rounds is not None else ()
        return self.data, self.whole if self.grouped else None, *iterator

    def start(self) -> None:
        """Start the processes that fetch ahead, if the job has any: before a model is made, whose memory they would
        share."""
        if self.mapped and self.job.workers and self.fetchers is None:
            self.fetchers = Fetchers(self.samples, self.job.workers)

    @property
    def loading_processes(self) -> tuple[int, int]:
        """Processes that load data for this one in training, and batches that they load ahead."""
        count = self.job.workers if self.mapped else 0
        return (count, AHEAD * count) if count else loading_processes(self.data)

    def close(self) -> None:
        """End the fetching processes."""
        if self.fetchers is not None:
            self.fetchers.close()
            self.fetchers = self.next_fetched = None

    def own(self, batch: Batch, part: int) -> Batch:
        """A part of a batch. A worker without samples takes a sample that does not count."""
        count = self.job.count(batch)
        if not count:
            raise Mistake(
                f"batch {self.taken} of the job's data has no samples: there is nothing for {self.assignment.parts} workers to "
                f"train on; leave it out of the data"
            )
        self.assignment.idle = part >= count
        return self.job.pieces(batch, min(self.assignment.parts, count))[0 if self.assignment.idle else part]

    def chosen_samples(self, begin: int) -> Iterator[list[int]]:
        """The sample numbers of every batch of a data set, from batch number `begin` on."""
        count, size, parts = len(self.data), self.job.batch, self.assignment.parts
        if reason := self.sampler.refusal(count, size):
            raise Mistake(reason + (f"; {OF_SAMPLES}" if is_listed(self.data) else ""))
        if self.sampler.fills_batches and size < parts:
            raise Mistake(
                f"batches of {size} samples for {parts} workers: some would have none; "
                f"give a batch of {parts} samples or more, or fewer --devices"
            )
        yield from self.sampler.batches(count, size, self.job.seed, begin)

    @property
    def how(self) -> str:
        """How it moves to a position, in words."""
        if self.rounds is None:
            return (
                "the data set resumes at its position" if self.mapped else "the list of batches resumes at its position"
            )
        return (
            "the data resume from their own state"
            if self.rounds.stateful
            else "the data are fast-forwarded, batch by batch"
        )

    def go_to(self, number: int) -> None:
        """Move to just before the batch with this number, as if all earlier ones had been returned."""
        if self.rounds is not None and number:
            try:
                self.part(number - 1, None)
            except StopIteration:
                raise Mistake(
                    f"the job's data end after {self.taken} batches and the run had taken {number}: "
                    f"give the data it was begun with"
                ) from None
        self.taken, self.chosen, self.next_fetched = number, None, None

    def state_dict(self) -> dict[str, Any]:
        ahead = self.rounds.ahead if self.rounds is not None else None
        return {
            "taken": self.taken,
            "data": self.rounds.state() if self.rounds is not None else None,
            "chance": self.random_stream.state if ahead is None else ahead.chance,
            "round": [self.epoch, self.in_round, self.round_over],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.rounds is not None and self.rounds.stateful and state["data"] is not None:
            with self.random_stream.drawing():
                self.rounds.load(state["data"], tuple(state.get("round", (0, state["taken"], False))))
            self.taken = state["taken"]
        else:
            self.go_to(state["taken"])
        if (
            self.rounds is None or self.rounds.ahead is None
        ):  # else the stream was saved after a batch was fetched ahead, as it was then
            self.random_stream.take(state["chance"])


@contextmanager
def looking(job: Job, assignment: Assignment | None = None, data: Callable[[], Any] | None = None) -> Iterator[Feed]:
    """A feed for looking at some batches: random streams are restored afterwards, and no process is started."""
    feed = Feed(replace(job, workers=0), assignment, data)
    before = [(one, one.get_state()) for one in generators_in(feed.data)]
    try:
        yield feed
    finally:
        for one, state in before:
            one.set_state(state)


def with_step_count(job: Job) -> Job:
    """The job with its total steps, if its data tell how many make an epoch."""
    steps = Feed(job).steps_in_all if job.epochs else 0
    if job.epochs and not steps and takes_steps(job):
        raise Mistake(UNKNOWN_STEPS)
    return replace(job, steps=steps) if steps else job


def first_steps(job: Job, steps: int) -> Job:
    """The job's first steps, for a trial: its schedule is still that of the whole job."""
    made = job.schedule
    if made is not None and takes_steps(job):
        whole = with_step_count(job).steps
        job = replace(job, schedule=lambda optimizer: made(optimizer, whole))
    return replace(job, steps=steps, epochs=0)
