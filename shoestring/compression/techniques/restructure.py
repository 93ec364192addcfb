"""Base of techniques that change a model's structure. Later techniques see calibration statistics of the smaller model,
whose outputs are compared with the original's."""

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
    """Abstract: `changed` returns the smaller model and the edit that rebuilds its structure."""

    seam: ClassVar[str] = "structure"
    order: ClassVar[int] = STRUCTURE

    @abstractmethod
    def changed(self, study: Calibration) -> tuple[nn.Module, Mapping[str, Any], Sequence[str]]:
        """Return a smaller model, leaving the calibrated one as it is; the edit that gives a freshly built model the
        same structure; and messages about what was left alone."""

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
        """Calibration statistics of the smaller model, computed once."""
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
        return ()  # never chosen automatically: only healing, which the user must allow, repairs its damage


def plain_offers(study: Calibration) -> dict[str, tuple[StorageOffer, ...]]:
    """Offers to store every weight uncompressed; pruned weights without their zeros."""
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
