"""Whether a list of held-out data is one of samples or one of ready batches, told by what the job trains on.

A list beside `collate` is one of samples, and without it one of batches. Held-out data often are the other kind: batches that were made
beforehand, beside a data set of samples. The form of an element tells them apart: its structure, and how many dimensions each tensor has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any

from torch.utils.data import DataLoader, default_collate

from shoestring.core.assignment import Assignment
from shoestring.core.batch import Batch
from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.core.mesh import on_one_axis
from shoestring.core.random_state import RandomStream
from shoestring.data.feed import Feed, looking
from shoestring.data.kinds import is_listed, is_mapped

Collate = Callable[[list[Any]], Batch]


class ByIdentity:
    """An object of the user's, as a key: equal to itself alone, because its own `__eq__` and `__hash__` may do anything."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def form(element: Any) -> str:
    """The structure of a sample or a batch, and the dimensions of its tensors. A list is as good as a tuple: torch makes the one of the
    other. Of items that are alike it does not matter how many there are.

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


@lru_cache(4)
def training_forms(data: ByIdentity, collate: ByIdentity) -> tuple[str, str]:
    """The form of a sample, of which the job makes batches, and of a batch; empty where there is none that can be seen at once."""
    sample = batch = ""
    with RandomStream(0).drawing(), suppress(Exception):  # what fails here fails in training, which tells of it
        made = data.value()
        if is_mapped(made) or (is_listed(made) and collate.value is not None):
            first = made[0]
            sample = form(first)
            batch = form((collate.value or default_collate)([first]))
        elif is_listed(made):
            batch = form(made[0])
        elif isinstance(made, DataLoader) and (is_mapped(made.dataset) or is_listed(made.dataset)):
            batch = form(made.collate_fn([made.dataset[0]]))
        elif isinstance(made, Iterator):  # a new one, which nobody else goes through
            batch = form(next(made))
    return sample, batch


def held_out_collate(job: Job, made: Any) -> Collate | None:
    """What makes batches of the job's held-out data; None where a list of them has batches already."""
    if not is_listed(made) or not made:
        return job.collate
    found, (sample, batch) = form(made[0]), training_forms(ByIdentity(job.data), ByIdentity(job.collate))
    if found == batch != sample:
        return None
    if found == sample != batch:
        return job.collate or default_collate
    if job.collate is None and batch and form_of_one(made[0]) == batch:
        raise Mistake(
            f"held_out in the Job is a list of samples, each {found}, and the job trains on batches, each {batch}: make "
            f"batches of them, such as held_out=DataLoader(samples, batch_size=...)"
        )
    return job.collate


def form_of_one(sample: Any) -> str:
    """The form of a batch of this sample alone, as torch makes it; empty if torch can't."""
    with suppress(Exception):
        return form(default_collate([sample]))
    return ""


def held_out_feed(job: Job, assignment: Assignment | None = None) -> Feed:
    """A feed of the held-out data, in order."""
    assert job.held_out is not None, "who asks has looked"
    feed = Feed(job, assignment, job.held_out)
    collate = held_out_collate(job, feed.data)
    return feed if collate is job.collate else Feed(replace(job, collate=collate), assignment, lambda: feed.data)


def check_held_out(job: Job) -> None:
    """Refuse a list of held-out data of which no batch can be made, before the job is trained."""
    if job.held_out is None:
        return
    alone = replace(job, mesh=on_one_axis(), sampler=None, workers=0)
    with looking(alone, data=job.held_out) as feed:
        if not is_listed(feed.data) or not feed.data:
            return
    next(held_out_feed(alone))
