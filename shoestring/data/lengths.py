"""Batch sizes: find the largest batch of a job's data. If sizes vary, a plan for the first batches would be too small
for others.

    stated        by the job (`largest=`)
    searched      in a pass over the batches as training will have them: the whole run if that is quick, else as many as fit into some
                  seconds. Batches are compared by the shapes of their tensors. If sizes can't be compared (one is wider, another
                  higher), a few are kept, and all of them are planned for

Data whose batches are all alike are planned for by their first ones.

Contract: Everything in planning takes its batches from `planned_batches(job)`; a child process is given the number of
the largest batch and goes to it in its own feed (tests/data/test_lengths.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from shoestring.core.batch import Batch, leaves
from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.core.private import dense_parts
from shoestring.core.running import random_state
from shoestring.core.units import bytes_text
from shoestring.core.user_code.data_objects import GivenData
from shoestring.core.user_code.foreign import attributes_of
from shoestring.core.workers.assignment import Assignment
from shoestring.core.workers.mesh import on_one_axis
from shoestring.data.elements import check_held_out, form, is_sample
from shoestring.data.feed import NO_BATCH, Feed, looking
from shoestring.data.fetch import AHEAD
from shoestring.data.kinds import can_be_shared

CALLS_USER = "data"  # core/user_code/seams.py

MOST = 2000  # most batches to look at,
ALIKE = 1.0  # for at most so many seconds while all have one size,
VARYING = 6.0  # and so many if sizes vary
FEW = 3  # most incomparable sizes to plan for
DIMENSIONS = 24  # with more, such as a list of images that all differ, only the bytes are compared
STATED = -1  # in place of a batch's number: the job states it


@dataclass(frozen=True)
class BatchSize:
    """The size of a batch."""

    shapes: tuple[tuple[int, ...], ...] = ()  # of its tensors, in order
    bytes: int = 0  # of all its tensors
    number: int = STATED  # of the batch in the data, from 0

    def covers(self, other: BatchSize) -> bool:
        """Whether another batch is nowhere larger than this one."""
        ours, theirs = ([size for shape in one.shapes for size in shape] for one in (self, other))
        comparable = list(map(len, self.shapes)) == list(map(len, other.shapes)) and len(ours) <= DIMENSIONS
        return other.bytes <= self.bytes and (not comparable or all(a >= b for a, b in zip(ours, theirs, strict=True)))

    def __str__(self) -> str:
        """
        >>> str(BatchSize(((8, 412), (8, 412), (8,)), 100))
        '8 x 412'
        """
        several = list(dict.fromkeys(sorted(self.shapes, key=lambda shape: (len(shape) < 2, -prod(shape)))))
        kept = [shape for shape in several if len(shape) > 1][:FEW] or several[:1]
        return " and ".join(" x ".join(map(str, shape)) for shape in kept) or "no tensor"


@dataclass(frozen=True)
class Lengths:
    """What is known about the sizes of a job's batches."""

    largest: tuple[
        BatchSize, ...
    ] = ()  # sizes that no other covers, the one with most bytes first; empty: not searched yet
    looked: int = 0  # batches that were looked at; 0: the job states the largest
    all_of: str = ""  # if these were all: "the run" or "an epoch"; empty: there are more
    typical: int = 0  # number of the batch with the median bytes
    varies: bool = False  # whether sizes differ
    first: bool = True  # whether the first ones are the largest: nothing else has to be planned for
    loaders: int = 0  # processes that load batches for the training process,
    ahead: int = 0  # and batches that they load ahead, in shared memory
    alone: str = ""  # the form of the first element of a list, where that looks like one sample rather than a batch

    @property
    def doubt(self) -> str:
        """A warning where a step seems to train on one sample; empty if there is no sign of it."""
        if not self.alone:
            return ""
        return (
            f"the job's data are a list whose first element looks like one sample and not like a batch: {self.alone}. "
            f"Every step trains on one element; collate=torch.utils.data.default_collate makes batches of a list of samples"
        )

    @property
    def beside(self) -> str:
        """A remark on loading processes, whose memory is not counted; empty if there are none."""
        if not self.loaders:
            return ""
        size = self.largest[0].bytes if self.largest else 0
        processes = f"{self.loaders} process{'es' if self.loaders > 1 else ''} for loading data"
        return f"not counted: {processes}, and up to {self.ahead} batches ahead in shared memory ({bytes_text(self.ahead * size)})"

    @property
    def planned_for(self) -> str:
        """A remark on the batches that a plan is based on; empty if all batches are alike."""
        if not self.largest or (not self.varies and self.looked):
            return ""
        if not self.looked:
            return f"memory for the largest batch that the job states, {self.largest[0]}; times for its first batches"
        which = ", ".join(f"batch {one.number}: {one}" for one in self.largest)
        scope = (
            f", all of {self.all_of}"
            if self.all_of
            else "; there are more, and you will be warned if a larger one comes"
        )
        return f"memory for the largest of {self.looked} batches looked at ({which}{scope})"


@dataclass(frozen=True)
class Look:
    """The result of looking at the data, with the batches it is about."""

    lengths: Lengths
    batches: tuple[Batch, ...] = ()  # the batches to plan for; empty: the first ones


def size_of(batch: Batch, number: int = STATED) -> BatchSize:
    """
    >>> import torch
    >>> size_of({"ids": torch.zeros(2, 5), "name": "a"})
    BatchSize(shapes=((2, 5),), bytes=40, number=-1)
    """
    parts = [part for tensor in tensors_in(batch) for part in dense_parts(tensor)]
    return BatchSize(tuple(tuple(map(int, part.shape)) for part in parts), sum(part.nbytes for part in parts), number)


def tensors_in(batch: Batch) -> Iterator[Tensor]:
    """Tensors of a batch, including those in attributes of objects (graphs)."""
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor):
            yield leaf
        elif (own := attributes_of(leaf)) is not None and not isinstance(leaf, type):
            for value in own.values():
                yield from (one for one in leaves(value) if isinstance(one, Tensor))


def largest_of(sizes: Iterable[BatchSize]) -> list[BatchSize]:
    """The sizes that no other covers, the one with most bytes first; of equal sizes, the first."""
    kept: list[BatchSize] = []
    for one in sizes:
        if not any(other.covers(one) for other in kept):
            kept = [other for other in kept if not one.covers(other)] + [one]
    return sorted(kept, key=lambda one: -one.bytes)


def look(job: Job) -> Look:
    """Find the batches to plan for."""
    if job.largest is not None:
        batch = job.largest()
        loaders, ahead = Feed(job).loading_processes
        return Look(Lengths((size_of(batch),), varies=True, first=False, loaders=loaders, ahead=ahead), (batch,))
    job = replace(job, mesh=on_one_axis())
    kept: dict[int, Batch] = {}  # number -> batch, for those sizes
    largest: list[BatchSize] = []
    sizes: list[BatchSize] = []
    begun = time.monotonic()
    with looking(job) as feed:
        wanted = min(feed.steps_in_all or MOST, MOST)
        for number, batch in enumerate(islice(feed, wanted)):
            sizes.append(size_of(batch, number))
            if number < 2 or not any(one.covers(sizes[-1]) for one in largest):
                largest = largest_of([*largest, sizes[-1]])[:FEW]
                kept = {
                    one: found
                    for one, found in [*kept.items(), (number, batch)]
                    if one in {size.number for size in largest}
                }
            varies = (
                len({(size.shapes, size.bytes) for size in (sizes[0], sizes[-1], *largest)}) > 1 or len(largest) > 1
            )
            if number and time.monotonic() - begun > (VARYING if varies else ALIKE):
                break
        rounds, steps = feed.epochs, feed.steps_in_all
        alone = form(feed.data[0]) if feed.listed and feed.data and is_sample(feed.data[0]) else ""
        loaders, ahead = (
            (job.workers, AHEAD * job.workers) if job.workers else feed.loading_processes
        )  # a look starts no processes
    if not sizes:
        raise Mistake(NO_BATCH)
    all_of = "the run" if len(sizes) == steps or feed.ended else "an epoch" if rounds else ""
    varies = len({(size.shapes, size.bytes) for size in sizes}) > 1
    first = len(largest) == 1 and all(size.covers(largest[0]) for size in sizes[:2])
    middle = sorted(sizes, key=lambda size: size.bytes)[len(sizes) // 2].number
    lengths = Lengths(tuple(largest), len(sizes), all_of, middle, varies, first, loaders, ahead, alone)
    return Look(lengths, () if first else tuple(kept[size.number] for size in largest))


def batches_at(job: Job, numbers: Iterable[int]) -> list[Batch]:
    """The batches with these numbers, whole."""
    found: dict[int, Batch] = {}
    with looking(replace(job, mesh=on_one_axis())) as feed:
        for number in sorted(set(numbers)):
            feed.go_to(number)
            found[number] = next(feed)
    return [found[number] for number in numbers]


def planned_for(job: Job, batch: Batch) -> Job:
    """The job, planned for this batch."""
    return replace(job, largest=lambda: batch)


@contextmanager
def planned_feed(job: Job, assignment: Assignment | None = None) -> Iterator[Feed]:
    """A feed of the batches that a plan is based on, a worker's part of each: the largest repeatedly, or those of the
    data if none is known."""
    if job.largest is None:
        with looking(job, assignment) as feed:
            yield feed
    else:
        batch = job.largest()
        with looking(replace(job, sampler=None, collate=None), assignment, lambda: [batch]) as feed:
            yield feed


def planned_batches(job: Job, assignment: Assignment | None = None) -> Iterator[Batch]:
    """The batches of such a feed."""
    with planned_feed(job, assignment) as feed:
        yield from feed


@contextmanager
def data_begun(job: Job) -> Iterator[Feed]:
    """A feed of the job's data after its first batch, to see what it keeps in memory then."""
    with looking(job) as feed:
        if not isinstance(feed.data, DataLoader):  # it keeps only its data set, and would start processes for nothing
            with suppress(StopIteration):
                feed.part(0, None)
            feed.whole = None  # in training this is the step's batch, which is counted elsewhere
        yield feed


def check_given(job: Job) -> None:
    """Refuse data, given to the Job as an object, whose first batch differs in a second pass; and held-out data that
    can't be made into batches."""
    check_held_out(job)
    for name, given in (("data", job.data), ("held_out", job.held_out)):
        if not isinstance(given, GivenData) or given.checked or given.state is not None or can_be_shared(given.value):
            continue
        first, again = (
            [one.clone() for batch in islice(held_feed(job, given), 1) for one in tensors_in(batch)] for _ in range(2)
        )
        if len(first) != len(again) or not all(map(same_bits, first, again)):
            raise Mistake(
                f"{name} in the Job is a {type(given.value).__name__} that gives other batches when it is read again, so "
                f"a run that stops could not resume with the same bits: give a function that makes it, {name}=lambda: ..."
            )
        given.checked = True


def held_feed(job: Job, given: GivenData) -> Iterator[Batch]:
    with looking(replace(job, mesh=on_one_axis(), sampler=None, collate=None), data=given) as feed:
        yield from feed


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bits, whatever their layout, NaN included."""
    return (
        one.shape == other.shape
        and one.dtype == other.dtype
        and all(
            torch.equal(a.nan_to_num(), b.nan_to_num())
            for a, b in zip(dense_parts(one), dense_parts(other), strict=True)
        )
    )


def shared_data(job: Job) -> Job:
    """The job with data made once in this process, where several feeds can share one object; each draws as if it had
    made them."""
    check_given(job)
    made: dict[
        int, tuple[Any, Callable[[], None]]
    ] = {}  # by the seed that they were drawn from; with the random state after making them

    def data() -> Any:
        seed = torch.initial_seed()
        if seed in made:
            made[seed][1]()
            return made[seed][0]
        found = job.data()
        if can_be_shared(found):
            after = random_state.state()
            made[seed] = found, lambda: random_state.restore(after)
        return found

    return replace(job, data=data)


def once(make: Callable[[], Batch]) -> Callable[[], Batch]:
    """A factory that makes its batch on first use, and keeps it."""
    return cache(make)
