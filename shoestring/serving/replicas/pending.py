"""A request's samples while they are computed, in one batch or in several."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from shoestring.serving.batching.queue import Queued
from shoestring.serving.sample import Sample, Tensors


@dataclass(frozen=True, eq=False)
class PendingSample:
    """What the queue holds for each sample."""

    request: PendingRequest
    place: int

    @property
    def sample(self) -> Sample:
        return self.request.samples[self.place]


class PendingRequest:
    def __init__(self, samples: Sequence[Sample], done: asyncio.Future[list[Tensors]]) -> None:
        self.samples, self.done = samples, done
        self.answers: dict[int, tuple[int, Tensors]] = {}  # by place: the generation of weights, and what it gave
        self.queued: list[Queued[PendingSample]] = []

    def answer(self, place: int, generation: int, tensors: Tensors) -> list[int]:
        """Keep an answer; gives the places to compute again because the weights were swapped between them."""
        if self.done.done():
            return []
        self.answers[place] = generation, tensors
        if len(self.answers) < len(self.samples):
            return []
        newest = max(found for found, _ in self.answers.values())
        old = [one for one, (found, _) in self.answers.items() if found < newest]
        for one in old:
            del self.answers[one]
        if not old:
            self.done.set_result([self.answers[one][1] for one in range(len(self.samples))])
        return old

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)
