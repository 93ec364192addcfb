"""Decode packed weights once, when the model is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from shoestring.compression.formats.packed_modules import decode_weights, place_formats
from shoestring.compression.technique import RUNNING, Compressed, CompressTechnique, ModelCost


@dataclass(frozen=True)
class Decode(CompressTechnique):
    """Decode weights once, when the model is loaded, instead of in every forward pass. The model is as fast as the
    original and takes as much memory; only the folder is small. Chosen if a latency can't be kept otherwise."""

    why: ClassVar[str] = "as fast as before, with ordinary weights in memory"
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


def place_and_decode(subject: Compressed) -> Compressed:
    """Put the weight formats into the model, and decode them if asked to."""
    model = place_formats(subject.model, subject.forms)
    return replace(subject, model=decode_weights(model) if subject.decoded else model)
