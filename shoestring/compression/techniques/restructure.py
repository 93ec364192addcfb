"""Techniques that change a model's structure: what follows of them is a study of the smaller model, compared with the original."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Self

from torch import nn

from shoestring.compression.calibration.calibration import Calibration
from shoestring.compression.formats.format import PlainFormat
from shoestring.compression.formats.packed_folder import buffers_of
from shoestring.compression.technique import STRUCTURE, Compressed, CompressTechnique, ModelCost, StorageOffer
from shoestring.core.errors import Mistake
from shoestring.core.technique import text


class Restructure(CompressTechnique, ABC):
    """Abstract: `changed` gives the smaller model and how it is made again."""

    seam: ClassVar[str] = "structure"
    order: ClassVar[int] = STRUCTURE

    @abstractmethod
    def changed(self, study: Calibration) -> tuple[nn.Module, Mapping[str, Any], Sequence[str]]:
        """A smaller model, the given one stays as it is; the edit that makes its structure of a fresh model; and what was left alone."""

    def cost(self, cost: ModelCost, /) -> ModelCost:
        study = self.studied(cost.study)
        edits = [*cost.about.get("edits", ()), *study.edits]
        return replace(
            cost,
            study=study,
            offers=plain_offers(study),
            buffers=buffers_of(study.model),
            about={**cost.about, "edits": edits},
        )

    def studied(self, study: Calibration) -> Calibration:
        """The study of the smaller model, made once."""
        key = text(self)
        if key not in study.derived:
            model, edit, left = self.changed(study)
            study.derived[key] = Calibration(
                model,
                study.forward,
                study.batches,
                study.others,
                study.measures,
                study.sample,
                original=study.original if study.original is not None else study.model,
                edits=(edit,),
                notes=(*study.notes, *(f"{key}: {one}" for one in left)),
            )
        return study.derived[key]

    def refusal(self, cost: ModelCost, /) -> str:
        try:
            self.studied(cost.study)
        except Mistake as error:
            return str(error)
        return ""

    def apply(self, subject: Compressed, /) -> Compressed:
        study = self.studied(subject.study)
        return replace(subject, model=copy.deepcopy(study.model), study=study, edits=(*subject.edits, *study.edits))

    @classmethod
    def choices(cls, cost: ModelCost, /) -> tuple[Self, ...]:
        return ()  # what it damages is mended by healing alone, which the user allows: it is for who asks


def plain_offers(study: Calibration) -> dict[str, tuple[StorageOffer, ...]]:
    """Every weight as it is; one that was cut to zeros, without them."""
    found: dict[str, tuple[StorageOffer, ...]] = {}
    for weight in study.weights:
        make = (
            partial(study.zeroed, weight, PlainFormat.of)
            if weight.name in study.masks
            else partial(PlainFormat.of, study.values[weight.name])
        )
        label = study.form(weight, "plain", make)
        study.damages[weight.name, label] = study.nothing
        found[weight.name] = (StorageOffer("", label, study.ways[weight.name, label]),)
    return found
