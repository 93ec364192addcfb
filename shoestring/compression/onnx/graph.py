"""An editable ONNX graph: nodes and constants, looked up by the names of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from shoestring.numerics.bit_packing import packed_bytes

Array = NDArray[Any]
CONTRIB = "com.microsoft"  # the domain of onnxruntime's own operators
CALLED = "called.model."  # prefix of a model's tensor names in what torch exports


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
        """Add a constant and return its name; an existing constant of this name is assumed to be equal."""
        if name not in self.constants:
            self.constants[name] = numpy_helper.from_array(np.asarray(values, order="C"), name)
        return name

    def nibbles(self, name: str, stream: Array, shape: Sequence[int]) -> str:
        """Add a constant of 4-bit integers from bytes that hold two each, the first in the lower half."""
        if name not in self.constants:
            count = -(-int(np.prod(shape)) // 2)
            self.constants[name] = helper.make_tensor(
                name, onnx.TensorProto.UINT4, list(shape), stream[:count].tobytes(), raw=True
            )
        return name

    def instead(self, old: onnx.NodeProto | None, new: Sequence[onnx.NodeProto]) -> None:
        """Replace a node by others; without a node, insert them at the start."""
        place = 0 if old is None else next(at for at, node in enumerate(self.nodes) if node is old)
        self.nodes[place : place + (old is not None)] = new

    def fold_transposes(self, shared: bool = True) -> None:
        """Replace Transpose of a constant by the transposed constant. `shared`: even if the original is still used, so
        that both are stored."""
        for node in list(self.nodes):
            name = node.input[0] if node.op_type == "Transpose" else ""
            if (
                name in self.constants
                and len(self.constants[name].dims) == 2
                and (shared or len(self.users(name)) == 1)
            ):
                self.constant(node.output[0], self.array(name).T)
                self.nodes = [one for one in self.nodes if one is not node]

    def rename(self, names: Mapping[str, str]) -> None:
        """Rename tensors everywhere."""
        for node in self.nodes:
            rename_in(node, names)
        self.constants = {names.get(name, name): value for name, value in self.constants.items()}
        for name, value in self.constants.items():
            value.name = name
        for one in (*self.model.graph.input, *self.model.graph.output, *self.model.graph.value_info):
            one.name = names.get(one.name, one.name)

    def proto(self) -> onnx.ModelProto:
        """The model as a protobuf, without unused nodes and constants."""
        self.drop_unused()
        graph = self.model.graph
        del graph.node[:], graph.initializer[:]
        graph.node.extend(self.nodes)
        graph.initializer.extend(self.constants.values())
        known = {one.domain for one in self.model.opset_import}
        if any(node.domain == CONTRIB for node in self.nodes) and CONTRIB not in known:
            self.model.opset_import.append(helper.make_opsetid(CONTRIB, 1))
        return self.model

    def with_outputs(self, names: Sequence[str]) -> bytes:
        """The serialized model with these inner float32 tensors as its outputs."""
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        del model.graph.node[:], model.graph.initializer[:], model.graph.output[:]
        model.graph.node.extend(self.nodes)
        model.graph.initializer.extend(self.constants.values())
        model.graph.output.extend(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in names)
        written: bytes = model.SerializeToString()
        return written

    def drop_unused(self) -> None:
        needed = {one.name for one in self.model.graph.output}
        kept = []
        for node in reversed(self.nodes):
            if needed.intersection(node.output):
                kept.append(node)
                needed.update(inputs_of(node))
        self.nodes = kept[::-1]
        self.constants = {name: value for name, value in self.constants.items() if name in needed}
        infos = [one for one in self.model.graph.value_info if any(one.name in node.output for node in self.nodes)]
        del self.model.graph.value_info[:]
        self.model.graph.value_info.extend(infos)


def inputs_of(node: onnx.NodeProto) -> set[str]:
    """Tensors that a node or its subgraphs read."""
    return {*node.input, *(name for graph in graphs_in(node) for inner in graph.node for name in inputs_of(inner))}


def graphs_in(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """Subgraphs of a node: the branches of an If, the body of a Loop."""
    return [attribute.g for attribute in node.attribute if attribute.HasField("g")]


def rename_in(node: onnx.NodeProto, names: Mapping[str, str]) -> None:
    for some in (node.input, node.output):
        for place, name in enumerate(some):
            some[place] = names.get(name, name)
    for graph in graphs_in(node):
        for inner in graph.node:
            rename_in(inner, names)
        for one in graph.output:  # it may return tensors that it did not compute
            one.name = names.get(one.name, one.name)


def inner_outputs(node: onnx.NodeProto) -> set[str]:
    """Tensors computed inside the subgraphs of a node."""
    return {
        name
        for graph in graphs_in(node)
        for name in (
            *(one.name for one in (*graph.input, *graph.initializer)),
            *(name for inner in graph.node for name in (*inner.output, *inner_outputs(inner))),
        )
    }


def slim(model: onnx.ModelProto) -> None:
    """Strip what no runtime reads (the exporter's stack traces, which dominate small files, doc strings and shapes of
    inner tensors), and give inner tensors short names."""
    graph = Graph(model)
    taken = (
        {one.name for one in (*model.graph.input, *model.graph.output)}
        | set(graph.constants)
        | {name for node in graph.nodes for name in inner_outputs(node)}
    )
    for node in graph.nodes:
        clear_texts(node)
    inner = (name for node in graph.nodes for name in node.output if name and name not in taken)
    short = (name for number in count() if (name := f"t{number}") not in taken)
    names = dict(zip(inner, short, strict=False))
    prefixes = {name: name.removeprefix(CALLED) for name in graph.constants if name.startswith(CALLED)}
    graph.rename(
        names | {name: new for name, new in prefixes.items() if new not in taken and new not in names.values()}
    )
    del model.graph.value_info[:], model.graph.metadata_props[:], model.metadata_props[:]
    for one in (*graph.constants.values(), *model.graph.input, *model.graph.output):
        del one.metadata_props[:]
        one.ClearField("doc_string")
    model.ClearField("doc_string")
    model.graph.ClearField("doc_string")
    graph.proto()


def clear_texts(node: onnx.NodeProto) -> None:
    del node.metadata_props[:]
    node.ClearField("name")
    node.ClearField("doc_string")
    for graph in graphs_in(node):
        del graph.value_info[:], graph.metadata_props[:]
        for inner in graph.node:
            clear_texts(inner)


def make_node(kind: str, inputs: Sequence[str], output: str, domain: str = "", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(kind, list(inputs), [output], name=f"made_{output}", domain=domain, **attributes)


def nibble_stream(codes: Array) -> Array:
    """Pack codes below 16 two to a byte, the first in the lower half; an odd end is padded with zero."""
    flat = np.zeros(packed_bytes(codes.size, 4), np.uint8) if codes.size % 2 else np.empty(codes.size // 2, np.uint8)
    even = np.zeros(len(flat) * 2, np.uint8)
    even[: codes.size] = codes.reshape(-1)
    return even[0::2] | (even[1::2] << 4)
