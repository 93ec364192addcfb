"""Mix unlabelled batches of another job into the student's data. They are trained on with the distillation loss alone.

After each labelled batch come `ratio` unlabelled ones of the same structure, whose labels are ignored. An epoch is one
pass over the labelled data. Each feed keeps its own position, so a resumed run continues with the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from shoestring.core.batch import Batch
from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.core.workers.mesh import on_one_axis
from shoestring.data.feed import Feed
from shoestring.training.validation import once_through, validation_feed


class Unlabelled(NamedTuple):
    """A batch whose labels do not count."""

    batch: Any


def unwrap(batch: Batch) -> Batch:
    """The batch as its job returned it."""
    return batch.batch if isinstance(batch, Unlabelled) else batch


class MixedBatches:
    """Alternates labelled and unlabelled batches. It has a state dict, so a resumed run need not skip batches."""

    def __init__(self, labelled: Job, unlabelled: Job, ratio: int) -> None:
        self.feeds = (
            Feed(replace(labelled, mesh=on_one_axis(), workers=0)),
            Feed(replace(unlabelled, mesh=on_one_axis(), workers=0)),
        )
        self.ratio = ratio
        self.in_round = 0
        self.resumed = False  # the next epoch continues from a loaded state

    def __len__(self) -> int:
        if not self.feeds[0].per_epoch:
            raise TypeError("the labelled data has no length")
        return self.feeds[0].per_epoch * (1 + self.ratio)

    def __iter__(self) -> Iterator[Batch]:
        if not self.resumed:
            self.in_round = 0
        self.resumed = False
        length = self.feeds[0].per_epoch * (1 + self.ratio)
        while not length or self.in_round < length:
            turn = self.in_round % (1 + self.ratio)
            batch = next(self.feeds[bool(turn)], None)
            if batch is None:
                return
            self.in_round += 1
            yield Unlabelled(batch) if turn else batch

    def state_dict(self) -> dict[str, Any]:
        return {
            "labelled": self.feeds[0].state_dict(),
            "unlabelled": self.feeds[1].state_dict(),
            "in_round": self.in_round,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for feed, name in zip(self.feeds, ("labelled", "unlabelled"), strict=True):
            feed.load_state_dict(state[name])
        self.in_round, self.resumed = state["in_round"], True


class HeldOutBatches:
    """Held-out batches of a job; can be iterated more than once."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def __iter__(self) -> Iterator[Batch]:
        return (batch for batch, _ in once_through(validation_feed(self.job, whole=True)))


def mix_unlabelled(job: Job, own: Job, unlabelled: Job, ratio: int) -> Job:
    """The job with unlabelled batches mixed into those of `own`. The data is already batched, so sampler and collate
    are dropped."""
    if ratio < 1:
        raise Mistake(f"--ratio {ratio}: give 1 unlabelled batch or more to a labelled one")
    return replace(
        job,
        data=lambda: MixedBatches(own, unlabelled, ratio),
        sampler=None,
        collate=None,
        workers=0,
        weight=lambda batch: own.weight(unwrap(batch)),
        split=own.split and split_wrapped(own.split),
        held_out=None if own.held_out is None else lambda: HeldOutBatches(own),
    )


def split_wrapped(own: Callable[[Batch, int], Sequence[Batch]]) -> Callable[[Batch, int], list[Batch]]:
    """The job's split function, extended to unlabelled batches."""

    def split(batch: Batch, pieces: int) -> list[Batch]:
        found = own(unwrap(batch), pieces)
        return [Unlabelled(piece) for piece in found] if isinstance(batch, Unlabelled) else list(found)

    return split
