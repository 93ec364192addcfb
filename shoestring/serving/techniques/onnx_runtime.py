"""Compute with onnxruntime instead of torch.

On MiniLM in int8 4.5 times as fast as torch for one sentence (benchmarks/compress/onnxruntime_speed.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from shoestring.core.exactness import Exactness
from shoestring.serving.measuring.evidence import ONNX, ONNX_INT8
from shoestring.serving.technique import Deployment, ServingCost, ServingTechnique


@dataclass(frozen=True)
class OnnxRuntime(ServingTechnique):
    """Compute with onnxruntime: it fuses what torch runs one by one; with `int8` it multiplies bytes.

    Costs: as much memory again for its own copy of the weights in every replica; with `int8`, the fidelity that was
    measured on samples of the job.

    Not for: models whose forward can't be traced into a graph; what it says then is the reason.
    """

    int8: bool = False

    order: ClassVar[int] = 10
    why: ClassVar[str] = "a graph of fused operators"

    @property
    def name(self) -> str:
        return ONNX_INT8 if self.int8 else ONNX

    @classmethod
    def choices(cls, cost: ServingCost) -> tuple[OnnxRuntime, ...]:
        return cls(), cls(int8=True)

    def refusal(self, cost: ServingCost) -> str:
        return "" if self.name in cost.evidence.engines else cost.evidence.missing.get(self.name, "it was not measured")

    def exactness(self, cost: ServingCost) -> Exactness:
        return Exactness.CHANGED if self.int8 else Exactness.ROUNDING

    def drift(self, cost: ServingCost) -> float:
        return 1 - cost.evidence.engines[self.name].quality

    def changes(self, deployment: Deployment) -> Mapping[str, object]:
        return {"engine": self.name}
