"""An ONNX graph that is being rewritten: nodes and constants, found by the names of what they give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from shoestring.compression.forms.bits import packed_bytes

Array = NDArray[Any]
CONTRIB = "com.microsoft"  # operators that onnxruntime has beside those of ONNX


class Graph:
    """A model's nodes in order, and its constants by name. `proto()` writes both back."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        self.nodes: list[onnx.NodeProto] = list(model.graph.node)
        self.constants: dict[str, onnx.TensorProto] = {one.name: one for one in model.graph.initializer}

    def users(self, name: str) -> list[onnx.NodeProto]:
        return [node for node in self.nodes if name in node.input]

    def maker(self, name: str) -> onnx.NodeProto | None:
        return next((node for node in self.nodes if name in node.output), None)

    def is_output(self, name: str) -> bool:
        return any(one.name == name for one in self.model.graph.output)

    def array(self, name: str) -> Array:
        return np.asarray(numpy_helper.to_array(self.constants[name]))

    def constant(self, name: str, values: Any) -> str:
        """A constant; one that has the name is taken to be the same."""
        if name not in self.constants:
            self.constants[name] = numpy_helper.from_array(np.ascontiguousarray(values), name)
        return name

    def nibbles(self, name: str, stream: Array, shape: Sequence[int]) -> str:
        """A constant of numbers of 4 bits, which numpy does not have, from bytes with the first number in the lower half."""
        if name not in self.constants:
            count = -(-int(np.prod(shape)) // 2)
            self.constants[name] = helper.make_tensor(name, onnx.TensorProto.UINT4, list(shape), stream[:count].tobytes(), raw=True)
        return name

    def instead(self, old: onnx.NodeProto | None, new: Sequence[onnx.NodeProto]) -> None:
        """Put nodes in the place of one, or before all."""
        place = 0 if old is None else next(at for at, node in enumerate(self.nodes) if node is old)
        self.nodes[place : place + (old is not None)] = new

    def fold_transposes(self, shared: bool = True) -> None:
        """Constants as they are after Transpose. `shared`: also those that are used otherwise too, which are then there twice."""
        for node in list(self.nodes):
            name = node.input[0] if node.op_type == "Transpose" else ""
            if name in self.constants and len(self.constants[name].dims) == 2 and (shared or len(self.users(name)) == 1):
                self.constant(node.output[0], self.array(name).T)
                self.nodes = [one for one in self.nodes if one is not node]

    def proto(self) -> onnx.ModelProto:
        """The model, without nodes and constants that nothing needs."""
        self.drop_unused()
        graph = self.model.graph
        del graph.node[:], graph.initializer[:]
        graph.node.extend(self.nodes)
        graph.initializer.extend(self.constants.values())
        known = {one.domain for one in self.model.opset_import}
        if any(node.domain == CONTRIB for node in self.nodes) and CONTRIB not in known:
            self.model.opset_import.append(helper.make_opsetid(CONTRIB, 1))
        return self.model

    def drop_unused(self) -> None:
        needed = {one.name for one in self.model.graph.output}
        kept = []
        for node in reversed(self.nodes):
            if needed.intersection(node.output):
                kept.append(node)
                needed.update(node.input)
                for attribute in node.attribute:  # what a nested graph needs from outside
                    for inner in attribute.g.node:
                        needed.update(inner.input)
        self.nodes = kept[::-1]
        self.constants = {name: value for name, value in self.constants.items() if name in needed}
        infos = [one for one in self.model.graph.value_info if any(one.name in node.output for node in self.nodes)]
        del self.model.graph.value_info[:]
        self.model.graph.value_info.extend(infos)


def made(kind: str, inputs: Sequence[str], output: str, domain: str = "", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(kind, list(inputs), [output], name=f"made_{output}", domain=domain, **attributes)


def nibble_stream(codes: Array) -> Array:
    """Codes below 16 as bytes, the first in the lower half; the end is filled up with a zero."""
    flat = np.zeros(packed_bytes(codes.size, 4), np.uint8) if codes.size % 2 else np.empty(codes.size // 2, np.uint8)
    even = np.zeros(len(flat) * 2, np.uint8)
    even[: codes.size] = codes.reshape(-1)
    return even[0::2] | (even[1::2] << 4)
