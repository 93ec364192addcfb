"""Linear layers that multiply whole numbers of 8 bits: faster than the original, not only smaller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Self

from torch import nn

from shoestring.compression.calibration.calibration import Calibration
from shoestring.compression.calibration.weight_usage import Weight
from shoestring.compression.formats.format import WeightFormat
from shoestring.compression.formats.int8 import INPUTS
from shoestring.compression.formats.int8 import Int8Format as Int8Form
from shoestring.compression.quantization.rounding import GridSetting, round_to_grid
from shoestring.compression.technique import ModelCost, Storage
from shoestring.core.errors import Mistake
from shoestring.core.private import own_parameters
from shoestring.measure.instructions import deadly

READ_BY_OTHERS = (
    nn.modules.linear.NonDynamicallyQuantizableLinear
)  # in torch's attention, which takes its weight and never calls it
SMALLEST = 16  # columns: below, rounding takes longer than it saves


@dataclass(frozen=True)
class Int8(Storage):
    """Weights and inputs of linear layers are rounded to 8 bits and multiplied as whole numbers, by torch's own product of bytes
    (`forms/int8.py`; Jacob et al. 2018, arXiv 1712.05877; a scale a token: Yao et al. 2022, "ZeroQuant", arXiv 2206.01861). Weights are
    rounded with the inputs in mind, as by Quantize, with one scale a row; a layer's damage is measured with its inputs rounded too.

    inputs   "token": every token has a scale of its own, found when it comes; "calibrated": one scale for all, from calibration: no search
             for the largest number, and inputs above it are cut to it

    Measured on MiniLM: damage .0026 and 1.5 times as fast for one sentence (2.1 for 32) with a scale a token, .0185 with a calibrated one
    (decisions/022). Chosen where a latency asks for it. Everything else than plain linear layers is left to other techniques.
    """

    inputs: str = "token"
    why: ClassVar[str] = (
        "products of bytes: a quarter of the bytes, and several times as fast where the processor has them"
    )

    def __post_init__(self) -> None:
        if self.inputs not in INPUTS:
            raise Mistake(f"Int8(inputs={self.inputs!r}): there are {', '.join(INPUTS)}")

    @classmethod
    def choices(cls, cost: ModelCost, /) -> tuple[Self, ...]:
        return (cls(),) if cost.wanted.latency is not None else ()

    def refusal(self, cost: ModelCost, /) -> str:
        if why := deadly("int8"):
            return why
        return (
            ""
            if any(self.fits(cost.study, weight) for weight in cost.study.weights)
            else (f"the model has no plain linear layer with {SMALLEST} inputs or more")
        )

    def only(self, cost: ModelCost) -> bool:
        return cost.forced

    def labels(self, cost: ModelCost, weight: Weight) -> Sequence[str]:
        study = cost.study
        if not self.fits(study, weight):
            return ()
        label = study.form(weight, f"int8, {self.inputs}", partial(self.form, study, weight))
        study.measured(weight, label)  # what rounding the inputs does does not follow from the weight's own error
        return (label,)

    def fits(self, study: Calibration, weight: Weight) -> bool:
        """Whether plain linear layers, and nobody else, use it."""
        if (
            weight.name in study.masks
            or len(weight.shape) != 2
            or weight.shape[1] < SMALLEST
            or str(weight.dtype) != "torch.float32"
        ):
            return False
        value = study.values[weight.name]
        users = [
            module for module in study.model.modules() if any(one is value for one in own_parameters(module).values())
        ]
        plain = all(
            type(module).forward is nn.Linear.forward
            and getattr(module, "weight", None) is value
            and not isinstance(module, READ_BY_OTHERS)
            for module in users
        )
        return plain and study.usage[weight.name].kinds == {"linear"}

    def form(self, study: Calibration, weight: Weight) -> WeightFormat:
        one = round_to_grid(study.values[weight.name], [GridSetting(8, weight.shape[1])], study.moment(weight))[0]
        return Int8Form.of(
            one.codes, one.scales, one.zeros, None if self.inputs == "token" else study.usage[weight.name].largest
        )
