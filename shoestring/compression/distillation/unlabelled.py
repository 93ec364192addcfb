"""Unlabelled data: batches of another job among those of the student's. Only the teacher says what they are.

Batches take turns: one labelled, then `ratio` unlabelled ones, of the same structure (what stands for the labels is never looked at). An
epoch is a round of the labelled data. Both are fed as they would be alone, from their own positions, so a run that was killed goes on with
the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from shoestring.core.batch import Batch
from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.core.mesh import on_one_axis
from shoestring.data.feed import Feed
from shoestring.training.validation import held_out, once_through


class Unlabelled(NamedTuple):
    """A batch whose labels do not count."""

    batch: Any


def bare(batch: Batch) -> Batch:
    """A batch as its job gave it."""
    return batch.batch if isinstance(batch, Unlabelled) else batch


class MixedBatches:
    """Labelled and unlabelled batches in turns; it has a state, so it resumes at once."""

    def __init__(self, labelled: Job, unlabelled: Job, ratio: int) -> None:
        self.feeds = (
            Feed(replace(labelled, mesh=on_one_axis(), workers=0)),
            Feed(replace(unlabelled, mesh=on_one_axis(), workers=0)),
        )
        self.ratio = ratio
        self.in_round = 0
        self.resumed = False  # the next round goes on where a state says

    def __len__(self) -> int:
        if not self.feeds[0].per_epoch:
            raise TypeError("the labelled data do not say how many they are")
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


class Once:
    """Held-out batches, made as the job says; whoever goes through them twice gets them twice."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def __iter__(self) -> Iterator[Batch]:
        return (batch for batch, _ in once_through(held_out(self.job, whole=True)))


def beside(job: Job, own: Job, unlabelled: Job, ratio: int) -> Job:
    """The job with unlabelled batches among those of `own`, whose feed makes them, so nothing is left to make a batch of."""
    if ratio < 1:
        raise Mistake(f"--ratio {ratio}: give 1 unlabelled batch or more to a labelled one")
    return replace(
        job,
        data=lambda: MixedBatches(own, unlabelled, ratio),
        sampler=None,
        collate=None,
        workers=0,
        weight=lambda batch: own.weight(bare(batch)),
        split=own.split and splitting(own.split),
        held_out=None if own.held_out is None else lambda: Once(own),
    )


def splitting(own: Callable[[Batch, int], Sequence[Batch]]) -> Callable[[Batch, int], list[Batch]]:
    """The job's own split, of labelled batches and of others."""

    def split(batch: Batch, pieces: int) -> list[Batch]:
        found = own(bare(batch), pieces)
        return [Unlabelled(piece) for piece in found] if isinstance(batch, Unlabelled) else list(found)

    return split
