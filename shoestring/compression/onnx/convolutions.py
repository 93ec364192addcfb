"""Int8 convolutions in ONNX: int8 products where onnxruntime is faster with them, int8 storage elsewhere.

    one group       QLinearConv: static quantization of inputs and outputs with calibrated ranges, and a weight scale per
                    output channel; batch norms are folded in, and a following Relu becomes the lower end of the range
    several groups  the weight in int8, dequantized by Cast and Mul, which onnxruntime folds when it loads the file: computed
                    in float32
    transposed      the same as several groups

Reason: with one group QLinearConv took a third of the CPU time of float32, with several groups more than float32 (1.4
times for depthwise); ConvInteger, which allows dynamic scales per sample, took as long as float32 (onnxruntime 1.31,
AVX-512 VNNI, one thread, 64 channels of 28 x 28).

Values beyond the calibrated ranges are clipped. So the file is compared with the model, and its fidelity measured,
before it is kept. Jacob et al. 2018, "Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference", arXiv 1712.05877.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import isfinite, prod
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper
from torch import Tensor

from shoestring.compression.onnx.check import run_session, session
from shoestring.compression.onnx.graph import Array, Graph, inputs_of, make_node

LEAST = 1024  # parameters of the smallest weight that is quantized
LARGEST_BIAS = 1 << 30  # as an int32


class Convolutions(Enum):
    """How an int8 file computes its convolutions; the first that is accurate enough is used."""

    INT8 = "computed in int8"
    STORED = "stored in int8, computed in float32"
    FLOAT = "in float32"


@dataclass(frozen=True)
class ByteRange:
    """Affine quantization of a tensor to uint8: scale * (byte - zero point)."""

    scale: np.float32
    zero: np.uint8

    @classmethod
    def of(cls, least: float, most: float) -> ByteRange:
        """
        >>> ByteRange.of(-1.0, 1.55)
        ByteRange(scale=np.float32(0.01), zero=np.uint8(100))
        """
        scale = max((most - least) / 255, 1e-12)
        return cls(np.float32(scale), np.uint8(round(-least / scale)))


def quantize_convolutions(
    graph: Graph, feeds: Sequence[Mapping[str, Tensor]], how: Convolutions, top: int
) -> list[str]:
    """Rewrite the graph's convolutions; returns messages for the user."""
    if how is Convolutions.FLOAT:
        return []
    fold_norms(graph)
    computed = [node for node in graph.nodes if how is Convolutions.INT8 and can_run_in_int8(graph, node)]
    relus = {node.output[0]: one for node in computed if (one := relu_after(graph, node)) is not None}
    results = {
        node.output[0]: relus[node.output[0]].output[0] if node.output[0] in relus else node.output[0]
        for node in computed
    }
    ranges = calibrate_ranges(
        graph,
        list(dict.fromkeys(name for node in computed for name in (node.input[0], results[node.output[0]]))),
        feeds,
    )
    computed = [node for node in computed if node.input[0] in ranges and results[node.output[0]] in ranges]
    for node in computed:
        to_qlinear_conv(graph, node, results[node.output[0]], ranges, top)
        if (relu := relus.get(node.output[0])) is not None:
            graph.nodes = [one for one in graph.nodes if one is not relu]
    stored = list(dict.fromkeys(node.input[1] for node in graph.nodes if is_convolution(graph, node)))
    for name in stored:
        store_in_int8(graph, name)
    ranged = f"fast: {len(computed)} convolutions computed in int8 on the ranges of {len(feeds)} calibration batches, and clipped beyond"
    rest = f"fast: {len(stored)} convolutions stored in int8 and computed in float32"
    return [*[ranged] * bool(computed), *[rest] * bool(stored)]


# Inspecting the graph


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {one.name: helper.get_attribute_value(one) for one in node.attribute}


def is_convolution(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether the node is a convolution whose weight is a large enough float32 constant."""
    if node.op_type not in ("Conv", "ConvTranspose") or node.domain or node.input[1] not in graph.constants:
        return False
    weight = graph.constants[node.input[1]]
    others = [
        one
        for one in graph.users(node.input[1])
        if one.op_type != node.op_type or list(one.input).count(node.input[1]) > 1
    ]
    return (
        weight.data_type == TensorProto.FLOAT
        and prod(weight.dims) >= LEAST
        and not others
        and not graph.is_output(node.input[1])
    )


def can_run_in_int8(graph: Graph, node: onnx.NodeProto) -> bool:
    return (
        is_convolution(graph, node)
        and node.op_type == "Conv"
        and attributes(node).get("group", 1) == 1
        and len(graph.users(node.input[1])) == 1
        and all(name in graph.constants for name in node.input[2:])
    )


def only_user(graph: Graph, node: onnx.NodeProto, kind: str) -> onnx.NodeProto | None:
    users = [one for one in graph.nodes if node.output[0] in inputs_of(one)]  # including branches of an If
    return users[0] if len(users) == 1 and users[0].op_type == kind and not graph.is_output(node.output[0]) else None


def relu_after(graph: Graph, node: onnx.NodeProto) -> onnx.NodeProto | None:
    return only_user(graph, node, "Relu")


def calibrate_ranges(graph: Graph, names: Sequence[str], feeds: Sequence[Mapping[str, Tensor]]) -> dict[str, ByteRange]:
    """Ranges of tensors over the calibration batches, always including zero. Tensors that are not finite are left
    out."""
    if not names:
        return {}
    runner = session(graph.with_outputs(names))
    ends = dict.fromkeys(names, (0.0, 0.0))
    for feed in feeds:
        for name, value in zip(names, run_session(runner, feed), strict=True):
            least, most = ends[name]
            ends[name] = float(np.min(value, initial=least)), float(np.max(value, initial=most))
    return {name: ByteRange.of(*both) for name, both in ends.items() if all(map(isfinite, both))}


# Rewriting


def fold_norms(graph: Graph) -> None:
    """Fold batch norms into the weight and bias of the preceding convolution."""
    for node in list(graph.nodes):
        norm = (
            only_user(graph, node, "BatchNormalization")
            if is_convolution(graph, node) and node.op_type == "Conv"
            else None
        )
        if norm is None or len(graph.users(node.input[1])) > 1:
            continue
        given = attributes(norm)
        if given.get("training_mode", 0) or not all(
            name in graph.constants for name in (*node.input[1:], *norm.input[1:])
        ):
            continue
        scale, shift, mean, variance = (graph.array(name).astype(np.float64) for name in norm.input[1:5])
        factor = scale / np.sqrt(variance + given.get("epsilon", 1e-5))
        weight, result = graph.array(node.input[1]), norm.output[0]
        bias = graph.array(node.input[2]) if len(node.input) > 2 else 0.0
        folded = (weight * factor.reshape(-1, *[1] * (weight.ndim - 1))).astype(np.float32)
        names = [
            graph.constant(f"{result}_weight", folded),
            graph.constant(f"{result}_bias", ((bias - mean) * factor + shift).astype("f")),
        ]
        graph.instead(node, [make_node("Conv", [node.input[0], *names], result, **attributes(node))])
        graph.nodes = [one for one in graph.nodes if one is not norm]


def quantize_rows(weight: Array, top: int, least: Array | float = 1e-12) -> tuple[Array, Array]:
    """Codes from -top to top, with a scale per row (at least `least`)."""
    scales = np.maximum(np.abs(weight).reshape(len(weight), -1).max(1) / top, least).astype(np.float32)
    wide = scales.reshape(-1, *[1] * (weight.ndim - 1))
    return np.clip(np.round(weight / wide), -top, top).astype(np.int8), scales


def to_qlinear_conv(graph: Graph, node: onnx.NodeProto, result: str, ranges: Mapping[str, ByteRange], top: int) -> None:
    """Replace a convolution by QLinearConv, followed by DequantizeLinear for readers in float32."""
    x, output = node.input[0], node.output[0]
    weight = graph.array(node.input[1])
    bias = graph.array(node.input[2]).astype(np.float64) if len(node.input) > 2 else np.zeros(len(weight))
    step = float(ranges[x].scale)
    codes, scales = quantize_rows(
        weight, top, np.maximum(np.abs(bias) / step / LARGEST_BIAS, 1e-12)
    )  # so that the bias fits too
    scaled = range_constants(graph, x, ranges[x])
    before = [] if graph.maker(f"{x}_bytes") else [make_node("QuantizeLinear", [x, *scaled], f"{x}_bytes")]
    weights = [
        graph.constant(f"{output}_codes", codes),
        graph.constant(f"{output}_scales", scales),
        graph.constant(f"{output}_zeros", np.zeros(len(weight), np.int8)),
    ]
    after = range_constants(graph, result, ranges[result])
    summand = graph.constant(f"{output}_summand", np.round(bias / (step * scales.astype(np.float64))).astype(np.int32))
    graph.instead(
        node,
        [
            *before,
            make_node(
                "QLinearConv", [f"{x}_bytes", *scaled, *weights, *after, summand], f"{result}_bytes", **attributes(node)
            ),
            make_node("DequantizeLinear", [f"{result}_bytes", *after], result),
        ],
    )


def range_constants(graph: Graph, name: str, found: ByteRange) -> list[str]:
    return [graph.constant(f"{name}_step", found.scale), graph.constant(f"{name}_zero", found.zero)]


def store_in_int8(graph: Graph, name: str) -> None:
    """Store a weight as int8 with a scale per row; onnxruntime dequantizes it once, when it loads the file."""
    weight = graph.array(name)
    codes, scales = quantize_rows(weight, 127)
    parts = [
        graph.constant(f"{name}_codes", codes),
        graph.constant(f"{name}_scales", scales.reshape(-1, *[1] * (weight.ndim - 1))),
    ]
    del graph.constants[name]
    graph.instead(
        None,
        [
            make_node("Cast", parts[:1], f"{name}_float", to=TensorProto.FLOAT),
            make_node("Mul", [f"{name}_float", parts[1]], name),
        ],
    )
