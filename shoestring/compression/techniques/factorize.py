"""Replace layers by low-rank factors: SVD for linear layers, Tucker for convolutions, tensor trains for embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from shoestring.compression.calibration.calibration import Calibration
from shoestring.compression.factorization.choose import factorization_for
from shoestring.compression.factorization.factor_edits import (
    apply_factor_edits,
    factor_edits_from_json,
    factor_edits_to_json,
    fit_factors,
)
from shoestring.compression.techniques.restructure import Restructure
from shoestring.core.errors import Mistake

KINDS = ("linear", "convolution", "embedding")


@dataclass(frozen=True)
class Factorize(Restructure):
    """Layers as chains of thinner ones: of a linear layer the singular value decomposition in the metric of its inputs,
    least |(W - U V) M^(1/2)| (Wang et al. 2024, "SVD-LLM", arXiv 2403.07378); of a convolution Tucker-2 (Kim et al.
    2016, arXiv 1511.06530); of an embedding a tensor train (Hrinchuk et al. 2020, arXiv 1901.10787).

    share    fraction of a layer's parameters to keep
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
            raise Mistake(
                f"Factorize(share={self.share}): give the share of a layer's parameters to keep, between 0 and 1"
            )

    def restructure(self, calibration: Calibration) -> tuple[nn.Module, Mapping[str, Any], Sequence[str]]:
        found = factorization_for(
            calibration.model,
            lambda model: calibration.forward(model, calibration.batches[0]),
            share=self.share,
            kinds=(self.kind,),
        )
        moments = {
            weight.name: moment.dense()
            for weight in calibration.weights
            if (moment := calibration.moment(weight)) is not None and not calibration.inputs_first(weight)
        }
        return (
            fit_factors(calibration.model, found.edits, moments),
            {"kind": "factors", "edits": factor_edits_to_json(found.edits)},
            found.told,
        )


def apply_factorization(model: nn.Module, edits: Sequence[Mapping[str, Any]]) -> nn.Module:
    """Give a freshly built model the factorized structure."""
    for edit in edits:
        model = apply_factor_edits(model, factor_edits_from_json(edit.get("edits")))
    return model
