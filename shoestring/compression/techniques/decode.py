"""Packed on disk, ordinary weights in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from shoestring.compression.formats.place import decoded, placed
from shoestring.compression.technique import RUNNING, Compressed, CompressTechnique, ModelCost


@dataclass(frozen=True)
class Decode(CompressTechnique):
    """Weights are decoded once, when the model is loaded, instead of in every call; only the folder is small. Chosen
    where a latency could not be kept otherwise.

        bytes on disk = packed        bytes in memory, seconds of an answer = the original's

    Costs: as much memory as the original; only the folder is small.

    Not for: models that have to be small in memory.
    """

    why: ClassVar[str] = "answers as fast as before, from ordinary weights in memory"
    seam: ClassVar[str] = "running"
    order: ClassVar[int] = RUNNING
    exact: ClassVar[bool] = True

    def cost(self, cost: ModelCost, /) -> ModelCost:
        return replace(cost, decoded=True, about={**cost.about, "decoded": True})

    def apply(self, subject: Compressed, /) -> Compressed:
        return replace(subject, decoded=True)

    @classmethod
    def choices(cls, cost: ModelCost, /) -> tuple[Self, ...]:
        return (cls(),) if cost.wanted.latency is not None else ()


def finished(subject: Compressed) -> Compressed:
    """The model with its forms in place."""
    model = placed(subject.model, subject.forms)
    return replace(subject, model=decoded(model) if subject.decoded else model)
