"""What the front knows of an engine, which lives in other processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shoestring.serving.engines.engine import ServingEngine
from shoestring.serving.sample import Signature, TensorForm

CONTAINERS: Mapping[str, type[Any]] = {"dict": dict, "tuple": tuple, "Tensor": Tensor}


@dataclass(frozen=True)
class EngineFacts:
    signature: Signature
    tolerance: float
    packs: bool
    why_not_packed: str
    memory: int  # bytes that loading it added to its process

    def to_json(self) -> dict[str, Any]:
        kinds = {
            name: [[one.name, one.dtype, list(one.shape)] for one in found]
            for name, found in (("inputs", self.signature.inputs), ("outputs", self.signature.outputs))
        }
        container = next(
            (name for name, one in CONTAINERS.items() if issubclass(self.signature.container, one)), "dict"
        )
        rest = {"tolerance": self.tolerance, "packs": self.packs, "why": self.why_not_packed, "memory": self.memory}
        return {**kinds, "container": container, **rest}

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> EngineFacts:
        inputs, outputs = (
            tuple(TensorForm(str(name), str(dtype), tuple(map(int, shape))) for name, dtype, shape in found[which])
            for which in ("inputs", "outputs")
        )
        signature = Signature(inputs, outputs, CONTAINERS[found["container"]])
        return EngineFacts(
            signature, float(found["tolerance"]), bool(found["packs"]), str(found["why"]), int(found["memory"])
        )


def facts_of(engine: ServingEngine, memory: int) -> EngineFacts:
    return EngineFacts(engine.signature, engine.tolerance, engine.packs, engine.why_not_packed, memory)
