"""Decode packed weights once, when the model is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from shoestring.compression.formats.packed_modules import decode_weights, place_formats
from shoestring.compression.technique import RUNNING, Compressed, CompressTechnique, ModelCost


@dataclass(frozen=True)
class Decode(CompressTechnique):
    """Decode weights once, when the model is loaded, instead of in every call; only the folder is small. Chosen if a
    latency can't be kept otherwise.

        bytes on disk = packed        bytes in memory, seconds of an answer = the original's

    Costs: as much memory as the original; only the folder is small.

    Not for: models that have to be small in memory.
    """

    why: ClassVar[str] = "as fast as before, with ordinary weights in memory"
    seam: ClassVar[str] = "running"
    order: ClassVar[int] = RUNNING
    exact: ClassVar[bool] = True

    def cost(self, cost: ModelCost, /) -> ModelCost:
        return replace(cost, decoded=True, about={**cost.about, "decoded": 1})  # as long as 0: no smaller folder

    def apply(self, subject: Compressed, /) -> Compressed:
        return replace(subject, decoded=True)

    @classmethod
    def choices(cls, cost: ModelCost, /) -> tuple[Self, ...]:
        return (cls(),) if cost.wanted.latency is not None else ()


def place_and_decode(subject: Compressed) -> Compressed:
    """Put the weight formats into the model, and decode them if asked to."""
    model = place_formats(subject.model, subject.forms)
    return replace(subject, model=decode_weights(model) if subject.decoded else model)
