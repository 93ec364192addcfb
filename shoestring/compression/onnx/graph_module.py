"""An ONNX graph whose weights are parameters of a torch module, so that it can be calibrated like any other model.

    MatMul, Gemm, Conv, Gather of a weight   ->   computed by torch, which shows how the weight is used
    all other nodes                          ->   segments between those, each computed by onnxruntime

A segment holds all nodes that can be computed after the same number of weights in a row. Weights that other operators
read are inputs of the segments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import onnx
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn
from torch.nn import functional

from shoestring.compression.onnx.check import session
from shoestring.compression.onnx.file_module import OnnxCall, SharedSession
from shoestring.compression.onnx.graph import Graph, graphs_in, inputs_of
from shoestring.core.errors import Mistake

FEWEST = 64  # numbers of the smallest matrix that counts as a weight
Values = Mapping[str, Tensor]  # by name
Compute = Callable[[Values], Tensor]


class OnnxWeight(nn.Module):
    """Holds one weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)


class OnnxGraphModule(OnnxCall):
    """The graph of an ONNX model. `names`: its weights, by the name of the submodule that holds each."""

    def __init__(self, model: onnx.ModelProto) -> None:
        super().__init__(model.graph)
        graph = Graph(model)
        self.names = dict(zip(holder_names(found := weight_names(graph)), found, strict=True))
        for holder, name in self.names.items():
            self.add_module(holder, OnnxWeight(torch.from_numpy(graph.array(name).copy())))
        self.steps = GraphSteps(graph, frozenset(found))
        self.register_buffer("graph", torch.frombuffer(bytearray(without_weights(model, found)), dtype=torch.uint8))

    def compute(self, feed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        weights = {name: getattr(self, holder).weight for holder, name in self.names.items()}
        return self.steps(feed, weights, self.outputs)


def holder_names(names: Sequence[str]) -> list[str]:
    """Names of submodules, which have no dots.

    >>> holder_names(["a.b", "a_b"])
    ['a_b', 'a_b_1']
    """
    found: list[str] = []
    for name in names:
        plain = name.replace(".", "_").strip("/") or "weight"
        taken = {*found, *dir(OnnxCall), "graph", "names", "steps", "kinds", "rows", "outputs"}
        found.append(next(one for one in (plain, *(f"{plain}_{n}" for n in range(1, 10**6))) if one not in taken))
    return found


def weight_names(graph: Graph) -> list[str]:
    """Float32 matrices among the constants, other than those that a subgraph reads."""
    inner = {name for node in graph.nodes for one in graphs_in(node) for each in one.node for name in inputs_of(each)}
    return [
        name
        for name, one in graph.constants.items()
        if one.data_type == TensorProto.FLOAT and len(one.dims) > 1 and prod(one.dims) >= FEWEST and name not in inner
    ]


def without_weights(model: onnx.ModelProto, names: Sequence[str]) -> bytes:
    """What the file has besides its weights."""
    rest = onnx.ModelProto()
    rest.CopyFrom(model)
    kept = [one for one in model.graph.initializer if one.name not in set(names)]
    del rest.graph.initializer[:]
    rest.graph.initializer.extend(kept)
    written: bytes = rest.SerializeToString()
    return written


@dataclass
class GraphSegment:
    """Nodes that onnxruntime computes at once, and the products with weights that follow."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    products: list[tuple[str, Compute]] = field(default_factory=list)  # name of the result, and how it is computed
    outputs: tuple[str, ...] = ()  # of the nodes, as far as they are needed
    runner: SharedSession | None = None  # made when the dtypes of its inputs are known

    @property
    def inputs(self) -> list[str]:
        made = {name for node in self.nodes for name in node.output}
        return list(dict.fromkeys(name for node in self.nodes for name in inputs_of(node) if name and name not in made))


class GraphSteps:
    """The segments of a graph, in order. Copies of a module share them."""

    def __init__(self, graph: Graph, weights: frozenset[str]) -> None:
        self.graph, self.constants = graph, {}
        self.segments = segments_of(graph, weights)
        for name in {one for segment in self.segments for one in segment.inputs if one in graph.constants}:
            if name not in weights:
                self.constants[name] = graph.constants[name]

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphSteps:
        return self

    def __call__(self, feed: Mapping[str, Tensor], weights: Values, outputs: Sequence[str]) -> dict[str, Tensor]:
        values = {**feed, **weights}
        for segment in self.segments:
            if segment.outputs:
                given = {name: values[name] for name in segment.inputs if name not in self.constants}
                runner = segment.runner = segment.runner or self.runner(segment, given)
                values |= runner(given, segment.outputs)
            for name, product in segment.products:
                values[name] = product(values)
        return {name: values[name] for name in outputs}

    def runner(self, segment: GraphSegment, given: Values) -> SharedSession:
        model, constants = self.graph.model, [self.constants[one] for one in segment.inputs if one in self.constants]
        inputs = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(one.detach().numpy().dtype), None)
            for name, one in given.items()
        ]
        outputs = [onnx.ValueInfoProto(name=name) for name in segment.outputs]
        graph = helper.make_graph(segment.nodes, "segment", inputs, outputs, initializer=constants)
        made = helper.make_model(
            graph, opset_imports=model.opset_import, ir_version=model.ir_version, functions=model.functions
        )
        return SharedSession(session(made.SerializeToString()))


def segments_of(graph: Graph, weights: frozenset[str]) -> list[GraphSegment]:
    """Divide the nodes into segments by the number of products with weights that come before them."""
    levels: dict[str, int] = {}
    segments: list[GraphSegment] = [GraphSegment()]
    reads: list[set[str]] = [set()]
    for node in graph.nodes:
        level = max((levels.get(name, 0) for name in inputs_of(node)), default=0)
        product = product_of(graph, node, weights)
        while len(segments) <= level + 1:
            segments.append(GraphSegment())
            reads.append(set())
        if product is not None:
            segments[level].products.append((node.output[0], product))
            reads[level] |= set(node.input)
        else:
            segments[level].nodes.append(node)
            reads[level] |= inputs_of(node)
        levels |= dict.fromkeys(node.output, level + (product is not None))
    ends = {one.name for one in graph.model.graph.output}
    for level, segment in enumerate(segments):
        after = ends.union(*reads[level + 1 :], *(products_read(graph, segment)))
        segment.outputs = tuple(name for node in segment.nodes for name in node.output if name and name in after)
    return segments


def products_read(graph: Graph, segment: GraphSegment) -> Iterator[set[str]]:
    for name, _ in segment.products:
        node = graph.maker(name)
        assert node is not None, "its result has its name"
        yield set(node.input)


# Products with weights


def product_of(graph: Graph, node: onnx.NodeProto, weights: frozenset[str]) -> Compute | None:
    """How torch computes a node that multiplies, convolves or looks up a weight; None for all others."""
    make = {"MatMul": matmul, "Gemm": gemm, "Conv": convolution, "Gather": lookup}.get(node.op_type)
    return make(graph, node, weights) if make is not None and not node.domain else None


def value_of(graph: Graph, name: str) -> Callable[[Values], Tensor]:
    """A tensor of the graph: computed before, or a constant."""
    if name in graph.constants:
        constant = torch.from_numpy(graph.array(name).copy())
        return lambda values: values.get(name, constant)
    return lambda values: values[name]


def matmul(graph: Graph, node: onnx.NodeProto, weights: frozenset[str]) -> Compute | None:
    x, weight = node.input
    maker = graph.maker(weight)
    if maker is not None and maker.op_type == "Transpose" and maker.input[0] in weights:
        inner = maker.input[0]
        if len(graph.constants[inner].dims) == 2 and x not in weights:
            return lambda values: functional.linear(values[x], values[inner])
    if weight not in weights or len(graph.constants[weight].dims) != 2 or x in graph.constants:
        return None
    return lambda values: values[x] @ values[weight]


def gemm(graph: Graph, node: onnx.NodeProto, weights: frozenset[str]) -> Compute | None:
    found = attributes(node)
    x, weight = node.input[:2]
    plain = (found.get("alpha", 1.0), found.get("beta", 1.0), found.get("transA", 0)) == (1.0, 1.0, 0)
    if not plain or weight not in weights or x in graph.constants:
        return None
    bias = value_of(graph, node.input[2]) if len(node.input) > 2 and node.input[2] else None
    turned = bool(found.get("transB", 0))

    def compute(values: Values) -> Tensor:
        product = functional.linear(values[x], values[weight]) if turned else values[x] @ values[weight]
        return product if bias is None else product + bias(values)

    return compute


def convolution(graph: Graph, node: onnx.NodeProto, weights: frozenset[str]) -> Compute | None:
    found = attributes(node)
    x, weight = node.input[:2]
    if weight not in weights or x in graph.constants or found.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
        return None
    spatial = len(graph.constants[weight].dims) - 2
    convolve: Any = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}.get(spatial)
    if convolve is None:
        return None
    ones = [1] * spatial
    pads = [0] * 2 * spatial if found.get("auto_pad") == b"VALID" else list(found.get("pads", [0] * 2 * spatial))
    before, after = pads[:spatial], pads[spatial:]
    bias = value_of(graph, node.input[2]) if len(node.input) > 2 and node.input[2] else None

    def compute(values: Values) -> Tensor:
        image, padding = values[x], before
        if before != after:
            around = [size for pair in zip(before[::-1], after[::-1], strict=True) for size in pair]
            image, padding = functional.pad(image, around), [0] * spatial
        return convolve(  # type: ignore[no-any-return]
            image,
            values[weight],
            None if bias is None else bias(values),
            list(found.get("strides", ones)),
            padding,
            list(found.get("dilations", ones)),
            int(found.get("group", 1)),
        )

    return compute


def lookup(graph: Graph, node: onnx.NodeProto, weights: frozenset[str]) -> Compute | None:
    weight, index = node.input
    if weight not in weights or len(graph.constants[weight].dims) != 2 or attributes(node).get("axis", 0):
        return None
    where, rows = value_of(graph, index), graph.constants[weight].dims[0]

    def compute(values: Values) -> Tensor:
        found = where(values)
        return functional.embedding(torch.where(found < 0, found + rows, found), values[weight])

    return compute


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {one.name: helper.get_attribute_value(one) for one in node.attribute}


def check_weights_found(model: OnnxGraphModule, path: str) -> None:
    """Refuse a file without float32 matrices."""
    if not model.names:
        raise Mistake(
            f"{path} has no float32 matrix of {FEWEST} numbers or more: it is quantized already, or in float16; give the file "
            f"that was exported in float32"
        )
