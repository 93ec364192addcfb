"""Store weights in float16: half the bytes, and hardly any damage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from shoestring.compression.calibration.weight_usage import Weight
from shoestring.compression.formats.format import PlainFormat
from shoestring.compression.technique import ModelCost, Storage


@dataclass(frozen=True)
class Half(Storage):
    """Store weights in float16 (IEEE 754-2019 binary16): the relative error is at most 2^-11.

    Weights with numbers beyond float16 (above 65,504) are left alone (`Calibration.too_large`).

    Costs: at most 2^-11 of each number; packed weights are decoded in every call.

    Not for: sizes below half of the original.
    """

    why: ClassVar[str] = "half the bytes, hardly any damage"

    def labels(self, cost: ModelCost, weight: Weight) -> Sequence[str]:
        value = cost.study.values[weight.name]
        if weight.dtype.itemsize <= 2:
            return ()
        if weight.name in cost.study.masks:
            return (
                cost.study.form(
                    weight,
                    "float16, zeros",
                    partial(cost.study.sparse_format, weight, partial(PlainFormat.of, stored="float16")),
                ),
            )
        return (cost.study.form(weight, "float16", partial(PlainFormat.of, value, "float16")),)
