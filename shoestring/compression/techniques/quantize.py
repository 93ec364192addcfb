"""Weight-only quantization to integers of 2 to 8 bits, with a scale and a zero point per group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from shoestring.compression.calibration.weight_usage import Weight
from shoestring.compression.formats.format import WeightFormat
from shoestring.compression.formats.grid import GridFormat
from shoestring.compression.quantization.rounding import GridSetting, RoundedWeight, round_to_grid
from shoestring.compression.technique import ModelCost, Storage
from shoestring.core.errors import Mistake

USUAL = (
    GridSetting(8, 128),
    GridSetting(6, 64),
    GridSetting(5, 64),
    GridSetting(4, 64),
    GridSetting(4, 32),
    GridSetting(3, 64),
    GridSetting(3, 32),
    GridSetting(2, 32),
)
GROUPS = {8: 128, 7: 64, 6: 64, 5: 64, 4: 64, 3: 64, 2: 32}
SMALLEST = 16  # smallest group size


@dataclass(frozen=True)
class Quantize(Storage):
    """Weight-only quantization to an integer grid per group, w = scale (code - zero point), rounded with GPTQ
    (`quantization/rounding.py`; Frantar et al. 2023, arXiv 2210.17323). Embeddings are rounded to nearest.

    bits     2 to 8 for every matrix; 0: the allocator chooses the bits of each weight
    group    group size: numbers of a row that share a float16 scale; 0: 128 for 8 bits, 32 for 2, else 64

    Measured on MiniLM (1 - cosine, linear layers / embeddings): 8 bits .00005 / .00001, 6 .0007 / .0001, 5 .0027 /
    .0003, 4 .0107 / .0013, 3 .040 / .005, 2 (groups of 32) .137 / .019.

    Costs: damage that grows about fourfold with each bit less; packed weights are decoded in every call.

    Not for: speed: use `Int8`, or add `Decode`.
    """

    bits: int = 0
    group: int = 0
    why: ClassVar[str] = "integers of 2 to 8 bits, rounded with GPTQ"

    def __post_init__(self) -> None:
        if self.bits and not 2 <= self.bits <= 8:
            raise Mistake(f"Quantize(bits={self.bits}): give 2 to 8, or 0 to choose bits per weight")
        if self.group < 0 or 0 < self.group < SMALLEST:
            raise Mistake(
                f"Quantize(group={self.group}): give {SMALLEST} or more, or 0; each group stores a scale of 16 bits"
            )

    @property
    def settings(self) -> tuple[GridSetting, ...]:
        if self.bits:
            return (GridSetting(self.bits, self.group or GROUPS[self.bits]),)
        return tuple(dict.fromkeys(GridSetting(bits, self.group or group) for bits, group in USUAL))

    def only(self, cost: ModelCost) -> bool:
        return bool(self.bits)

    def labels(self, cost: ModelCost, weight: Weight) -> Sequence[str]:
        if not weight.is_matrix:
            return ()
        columns = cost.study.shape(weight)[1]
        settings = [one for one in self.settings if self.bits or not cost.bits or one.bits in cost.bits]
        if weight.name in cost.study.masks:
            zeroed = partial(cost.study.sparse_format, weight)
            return [
                cost.study.form(
                    weight, f"grid {one.bits}/{one.group}, zeros", partial(zeroed, partial(round_vector, one))
                )
                for one in settings
            ]
        return cost.study.grids(
            weight, list(dict.fromkeys(GridSetting(bits, min(group, columns)) for bits, group in settings))
        )


def round_vector(setting: GridSetting, values: Tensor) -> WeightFormat:
    """Quantize a vector on a grid, rounded to nearest."""
    nothing = torch.zeros(1, 0)
    one = round_to_grid(values[None], [setting])[0] if len(values) else RoundedWeight(nothing, nothing, nothing, 0.0)
    return GridFormat.of(
        one.codes, one.scales, one.zeros, setting.bits, setting.group, tuple(values.shape), values.dtype
    )
