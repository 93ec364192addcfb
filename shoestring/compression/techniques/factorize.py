"""Thin matrices in the place of wide ones: low rank, Tucker, tensor train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from shoestring.compression.calibration.calibration import Calibration
from shoestring.compression.factorization.choose import factorization_for
from shoestring.compression.factorization.edits import as_json, edited, fitted, from_json
from shoestring.compression.techniques.restructure import Restructure
from shoestring.core.errors import Mistake

KINDS = ("linear", "convolution", "embedding")


@dataclass(frozen=True)
class Factorize(Restructure):
    """Layers as chains of thinner ones: of a linear layer the singular value decomposition in the metric of its inputs,
    least |(W - U V) M^(1/2)| (Wang et al. 2024, "SVD-LLM", arXiv 2403.07378); of a convolution Tucker-2 (Kim et al.
    2016, arXiv 1511.06530); of an embedding a tensor train (Hrinchuk et al. 2020, arXiv 1901.10787).

    share    of a layer's numbers that is kept
    kind     linear, convolution or embedding

    Measured on MiniLM, linear layers (1 - cosine, without healing): share .9 .077 (plain SVD .315), .75 .119, .5
    .218: its weights are of full rank, and a grid of 4 bits damages seven times less at an eighth of the bytes.
    Embedding: share .9 .014, .75 .38. So it is never the best choice there (benchmarks/compress/README.md,
    Factorization). Of a convolutional net for digits half of the numbers changed the accuracy by 0.2 points at most.

    Costs: more damage than a grid of 4 bits at eight times its bytes, where weights are of full rank.

    Not for: weights of full rank, which most transformers have, or sizes that `Quantize` reaches.
    """

    share: float = 0.5
    kind: str = "linear"
    why: ClassVar[str] = "fewer operations where a layer is of low rank"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise Mistake(f"Factorize(kind={self.kind!r}): there are {', '.join(KINDS)}")
        if not 0 < self.share < 1:
            raise Mistake(f"Factorize(share={self.share}): give a share between 0 and 1 of a layer's numbers")

    def changed(self, study: Calibration) -> tuple[nn.Module, Mapping[str, Any], Sequence[str]]:
        found = factorization_for(
            study.model, lambda model: study.forward(model, study.batches[0]), share=self.share, kinds=(self.kind,)
        )
        moments = {
            weight.name: moment.dense()
            for weight in study.weights
            if (moment := study.moment(weight)) is not None and not study.inputs_first(weight)
        }
        return fitted(study.model, found.edits, moments), {"kind": "factors", "edits": as_json(found.edits)}, found.told


def factorized_again(model: nn.Module, edits: Sequence[Mapping[str, Any]]) -> nn.Module:
    """The structure, of a fresh model."""
    for edit in edits:
        model = edited(model, from_json(edit.get("edits")))
    return model
