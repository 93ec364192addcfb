"""The list of serving techniques. A new one is one file, and one line here."""

from __future__ import annotations

from shoestring.serving.technique import ServingTechnique
from shoestring.serving.techniques.dynamic_batching import DynamicBatching, PackedBatching
from shoestring.serving.techniques.onnx_runtime import OnnxRuntime
from shoestring.serving.techniques.replicate import Replicate

CATALOGUE: tuple[type[ServingTechnique], ...] = (OnnxRuntime, DynamicBatching, PackedBatching, Replicate)
CONFLICTS: dict[frozenset[str], str] = {
    frozenset(("DynamicBatching", "PackedBatching")): "both say how requests are batched: choose one"
}
