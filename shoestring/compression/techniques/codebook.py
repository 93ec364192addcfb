"""Scalar codebook quantization: weights as codes into a table of fitted values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor

from shoestring.compression.calibration.weight_usage import Weight
from shoestring.compression.formats.format import WeightFormat
from shoestring.compression.quantization.scalar_codes import METHODS, fit_codebook
from shoestring.compression.technique import ModelCost, Storage
from shoestring.core.errors import Mistake


@dataclass(frozen=True)
class Codebook(Storage):
    """Codes of 2 to 8 bits into 2^bits values (float16), and a scale for every group of a row; values are the means of
    bins with equally many numbers (percentile), or k-means that weighs each number by the mean square of its input
    (`quantization/scalar_codes.py`; Lloyd 1982, doi 10.1109/TIT.1982.1056489; Han, Mao, Dally 2016, "Deep Compression", arXiv
    1510.00149).

    bits     per code, 2 to 8
    group    numbers of a row that share a scale; 0: no scales
    fit      kmeans: k-means, each number weighted by the mean square of its input; percentile: means of equally populated
             bins

    Measured on MiniLM's linear layers (1 - cosine; a grid with GPTQ's rounding has .011 and .039): 4 bits percentile
    .050, k-means .031, weighted .027; 3 bits .149, .136, .111. Of its embedding, 4 bits: .0023, .0012, .0012, as a grid
    (.0012). So at 4 bits and fewer it is never the best choice there (benchmarks/compress/README.md, Codebooks); at 8
    bits, weighted and without scales, it is as good as a grid (.00022 against .00027). Use it to compare, or for
    weights that have only a few distinct values.

    Costs: a table for every weight, time for k-means, and more damage than `Quantize` at the same bits for
    linear layers.

    Not for: linear layers at 3 bits and more: `Quantize`, which considers the inputs, is better there.
    """

    bits: int = 4
    group: int = 64
    fit: str = "kmeans"
    why: ClassVar[str] = "values placed where the weights are"
    on_request: ClassVar[bool] = True  # GPTQ on grids does less damage at the same bytes (benchmarks/compress)

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8 or self.group < 0:
            raise Mistake(
                f"Codebook(bits={self.bits}, group={self.group}): give 2 to 8 bits, and a group size of 0 (none) or more"
            )
        if self.fit not in METHODS:
            raise Mistake(f"Codebook(fit={self.fit!r}): there are {', '.join(METHODS)}")

    def only(self, cost: ModelCost) -> bool:
        return True

    def labels(self, cost: ModelCost, weight: Weight) -> Sequence[str]:
        if not weight.is_matrix:
            return ()
        calibration, label = cost.study, f"codebook {self.bits}/{self.group} {self.fit}"
        if weight.name in calibration.masks:
            return (
                calibration.form(weight, f"{label}, zeros", partial(calibration.sparse_format, weight, self.of_vector)),
            )
        importance = calibration.importance(weight)
        value = calibration.values[weight.name]
        return (
            calibration.form(weight, label, partial(fit_codebook, value, self.bits, self.group, importance, self.fit)),
        )

    def of_vector(self, values: Tensor) -> WeightFormat:
        return fit_codebook(values, self.bits, self.group, None, self.fit)
