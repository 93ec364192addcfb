"""Int8 quantization of weights and activations of linear layers: faster than the original, not only smaller."""

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
)  # torch's attention reads its weight and never calls it
SMALLEST = 16  # columns: in smaller layers quantizing the inputs takes longer than it saves


@dataclass(frozen=True)
class Int8(Storage):
    """Quantize weights and activations of linear layers to 8 bits and multiply them with torch's int8 matrix product
    (`formats/int8.py`; Jacob et al. 2018, arXiv 1712.05877; per-token scales: Yao et al. 2022, "ZeroQuant", arXiv
    2206.01861). Weights are rounded with GPTQ, with one scale per output channel. A layer's damage is measured with its
    inputs quantized too.

    inputs   "token": dynamic quantization, a scale per token; "calibrated": static quantization, one scale from calibration,
             which saves the search for the largest number and clips larger inputs

    Measured on MiniLM: damage .0026 and 1.5 times as fast for one sentence (2.1 times for 32) with a scale per token;
    damage .0185 with a calibrated scale (decisions/022). Chosen if a latency asks for it. Only plain linear layers are
    quantized; other weights are left to other techniques.

    Costs: damage by rounding inputs as well as weights, about that of 5 bits on MiniLM.

    Not for: processors without a product of bytes, where it is slow, and layers other than plain linear ones.
    """

    inputs: str = "token"
    why: ClassVar[str] = "int8 products: a quarter of the bytes, and several times as fast where the CPU supports them"

    def __post_init__(self) -> None:
        if self.inputs not in INPUTS:
            raise Mistake(f"Int8(inputs={self.inputs!r}): choose one of {', '.join(INPUTS)}")

    @classmethod
    def choices(cls, cost: ModelCost, /) -> tuple[Self, ...]:
        return (cls(),) if cost.wanted.latency is not None else ()

    def refusal(self, cost: ModelCost, /) -> str:
        if why := deadly("int8"):
            return why
        return (
            ""
            if any(self.fits(cost.study, weight) for weight in cost.study.weights)
            else f"the model has no plain linear layer with {SMALLEST} inputs or more"
        )

    def only(self, cost: ModelCost) -> bool:
        return cost.forced

    def labels(self, cost: ModelCost, weight: Weight) -> Sequence[str]:
        calibration = cost.study
        if not self.fits(calibration, weight):
            return ()
        label = calibration.form(weight, f"int8, {self.inputs}", partial(self.form, calibration, weight))
        calibration.measure_damage(
            weight, label
        )  # the effect of quantizing inputs does not follow from the weight's error
        return (label,)

    def fits(self, calibration: Calibration, weight: Weight) -> bool:
        """Whether only plain linear layers use the weight."""
        if (
            weight.name in calibration.masks
            or len(weight.shape) != 2
            or weight.shape[1] < SMALLEST
            or str(weight.dtype) != "torch.float32"
        ):
            return False
        value = calibration.values[weight.name]
        users = [
            module
            for module in calibration.model.modules()
            if any(one is value for one in own_parameters(module).values())
        ]
        plain = all(
            type(module).forward is nn.Linear.forward
            and getattr(module, "weight", None) is value
            and not isinstance(module, READ_BY_OTHERS)
            for module in users
        )
        return plain and calibration.usage[weight.name].kinds == {"linear"}

    def form(self, calibration: Calibration, weight: Weight) -> WeightFormat:
        one = round_to_grid(
            calibration.values[weight.name], [GridSetting(8, weight.shape[1])], calibration.moment(weight)
        )[0]
        return Int8Form.of(
            one.codes, one.scales, one.zeros, None if self.inputs == "token" else calibration.usage[weight.name].largest
        )
