"""Whether a list of held-out data contains samples or ready batches, found by comparing with the training data.

A list beside `collate` contains samples, and without it batches. Held-out data often are the other kind: prepared
batches beside a data set of samples. The form of an element tells them apart: its structure, and the number of
dimensions of each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any

from torch.utils.data import DataLoader, default_collate

from shoestring.core.batch import Batch, leaves
from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.core.running.random_state import RandomStream
from shoestring.core.workers.assignment import Assignment
from shoestring.core.workers.mesh import on_one_axis
from shoestring.data.feed import Feed, looking
from shoestring.data.kinds import is_listed, is_mapped

Collate = Callable[[list[Any]], Batch]


class ByIdentity:
    """A user's object as a dictionary key: equal to itself only, because its own `__eq__` and `__hash__` may do
    anything."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def form(element: Any) -> str:
    """The structure of a sample or a batch, and the dimensions of its tensors. Lists and tuples are treated alike,
    because torch turns one into the other. The number of similar items does not matter.

    >>> import torch
    >>> form({"x": torch.zeros(4, 3), "y": [1, 2]})
    "{'x': Tensor of 2 dimensions, 'y': several int}"
    >>> form((torch.zeros(3), 1.0))
    '(Tensor of 1 dimension, float)'
    """
    if isinstance(element, Mapping):
        return "{" + ", ".join(f"{name!r}: {form(value)}" for name, value in element.items()) + "}"
    if isinstance(element, (list, tuple)):
        inside = [form(value) for value in element]
        return f"({', '.join(inside)})" if len(set(inside)) != 1 else f"several {inside[0]}"
    count = getattr(element, "ndim", None)
    return type(element).__name__ + (f" of {count} dimension{'s' * (count != 1)}" if isinstance(count, int) else "")


def is_sample(element: Any) -> bool:
    """Whether an element looks like one sample: it has a number, where a batch has one for each of its samples, beside nothing that has
    more than one dimension.

    >>> import torch
    >>> is_sample((torch.zeros(3), 1)), is_sample({"ids": torch.zeros(3), "label": torch.tensor(1)})
    (True, True)
    >>> is_sample((torch.zeros(4, 3), 0.5)), is_sample((torch.zeros(3), torch.zeros(3))), is_sample([1, 2])
    (False, False, False)
    """
    found = [0 if isinstance(one, (int, float)) else getattr(one, "ndim", None) for one in leaves(element)]
    return 0 in found and max((one for one in found if one is not None), default=0) == 1


@lru_cache(4)
def training_forms(data: ByIdentity, collate: ByIdentity) -> tuple[str, str]:
    """The forms of a sample and of a batch that the job trains on; empty where they can't be seen without work."""
    sample = batch = ""
    with RandomStream(0).drawing(), suppress(Exception):  # training will report the failure
        made = data.value()
        if is_mapped(made) or (is_listed(made) and collate.value is not None):
            first = made[0]
            sample = form(first)
            batch = form((default_collate if collate.value is None else collate.value)([first]))
        elif is_listed(made):
            batch = form(made[0])
        elif isinstance(made, DataLoader) and (is_mapped(made.dataset) or is_listed(made.dataset)):
            batch = form(made.collate_fn([made.dataset[0]]))
        elif isinstance(made, Iterator):  # a new one, which nobody else reads
            batch = form(next(made))
    return sample, batch


def held_out_collate(job: Job, made: Any) -> Collate | None:
    """The collate function for the job's held-out data; None if a list of them contains batches already."""
    if not is_listed(made) or not made:
        return job.collate
    found, (sample, batch) = form(made[0]), training_forms(ByIdentity(job.data), ByIdentity(job.collate))
    if found == batch != sample:
        return None
    if found == sample != batch:
        return default_collate if job.collate is None else job.collate
    if job.collate is None and batch and form_of_one(made[0]) == batch:
        raise Mistake(
            f"held_out in the Job is a list of samples, each {found}, and the job trains on batches, each {batch}: make "
            f"batches of them, such as held_out=DataLoader(samples, batch_size=...)"
        )
    return job.collate


def form_of_one(sample: Any) -> str:
    """The form of a batch with this sample alone, as torch makes it; empty if torch can't."""
    with suppress(Exception):
        return form(default_collate([sample]))
    return ""


def held_out_feed(job: Job, assignment: Assignment | None = None) -> Feed:
    """A feed of the held-out data, in order."""
    assert job.held_out is not None, "the caller has checked this"
    feed = Feed(job, assignment, job.held_out)
    collate = held_out_collate(job, feed.data)
    return feed if collate is job.collate else Feed(replace(job, collate=collate), assignment, lambda: feed.data)


def check_held_out(job: Job) -> None:
    """Refuse a list of held-out data that can't be made into batches, before training."""
    if job.held_out is None:
        return
    alone = replace(job, mesh=on_one_axis(), sampler=None, workers=0)
    with looking(alone, data=job.held_out) as feed:
        if not is_listed(feed.data) or not feed.data:
            return
    next(held_out_feed(alone))
