"""Base classes of techniques that make another model, which is then calibrated and compared with the original."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from torch import nn

from shoestring.compression.calibration.calibration import Calibration
from shoestring.compression.formats.manifest import folder_bytes
from shoestring.compression.formats.packed_folder import buffers_of
from shoestring.compression.technique import STRUCTURE, Compressed, CompressTechnique, ModelCost, StorageOffer
from shoestring.core.errors import Mistake
from shoestring.core.technique import text


class DeriveModel(CompressTechnique, ABC):
    """Abstract: `derive` calibrates the other model. It is called once per calibration, which caches the result."""

    on_request: ClassVar[bool] = True  # only healing, which the user must request, repairs its damage

    @abstractmethod
    def derive(self, study: Calibration) -> Calibration:
        """The calibration of the other model, compared with the original; the given calibration and its model are not
        changed."""

    def derived_calibration(self, study: Calibration) -> Calibration:
        return study.derived(text(self), partial(self.derive, study))

    def cost(self, cost: ModelCost, /) -> ModelCost:
        study = self.derived_calibration(cost.study)
        edits = [*cost.about.get("edits", ()), *study.edits]
        return replace(
            cost,
            study=study,
            offers=plain_offers(study),
            buffers=buffers_of(study.model),
            about={**cost.about, "edits": edits},
        )

    def refusal(self, cost: ModelCost, /) -> str:
        try:
            self.derived_calibration(cost.study)
        except Mistake as error:
            return str(error)
        return ""

    def apply(self, subject: Compressed, /) -> Compressed:
        study = self.derived_calibration(subject.study)
        return replace(subject, model=copy.deepcopy(study.model), study=study, edits=(*subject.edits, *study.edits))


class Restructure(DeriveModel, ABC):
    """Abstract: `restructure` returns a model with a smaller structure, and the edit that makes it again."""

    seam: ClassVar[str] = "structure"
    order: ClassVar[int] = STRUCTURE
    saves_bytes: ClassVar[bool] = True  # else it only saves time, and the folder may grow

    def refusal(self, cost: ModelCost, /) -> str:
        """Refuses a model whose folder would not be smaller: of a small one, the description of the new structure can
        take more bytes than the cut saves. Who wants an answer in less time may have it."""
        if (why := super().refusal(cost)) or not self.saves_bytes or cost.wanted.latency is not None:
            return why
        before, after = (plain_bytes(one) for one in (cost, self.cost(cost)))
        if after < before:
            return ""
        return f"it makes the folder no smaller: {after:,} bytes, where the model as it is takes {before:,}"

    @abstractmethod
    def restructure(self, study: Calibration) -> tuple[nn.Module, Mapping[str, Any], Sequence[str]]:
        """A smaller copy of the model; the edit that gives a freshly built model the same structure; and messages about
        parts that were left alone."""

    def derive(self, study: Calibration) -> Calibration:
        model, edit, left = self.restructure(study)
        return Calibration(
            model,
            study.forward,
            study.batches,
            study.others,
            study.measures,
            study.sample,
            timed=study.timed,
            original=study.original if study.original is not None else study.model,
            edits=(edit,),
            notes=(*study.notes, *(f"{text(self)}: {one}" for one in left)),
        )


def plain_bytes(cost: ModelCost) -> int:
    """Bytes of the folder with every weight as it is."""
    study = cost.study
    stored = {weight.name: study.ways[weight.name, study.as_it_is(weight)].stored for weight in study.weights}
    return folder_bytes(cost.about, stored, cost.buffers)


def plain_offers(study: Calibration) -> dict[str, tuple[StorageOffer, ...]]:
    """Every weight unchanged; a pruned one without its zeros."""
    labels = {weight.name: study.as_it_is(weight) for weight in study.weights}
    return {name: (StorageOffer("", label, study.ways[name, label]),) for name, label in labels.items()}
