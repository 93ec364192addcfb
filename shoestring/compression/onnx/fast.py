"""Int8 inference in onnxruntime: dynamic quantization of linear layers with a scale per token.

    y = m ((round(127 x' / m) Q) s / 127)        x' = x / t,  m = max |x'| of the token,  Q s = rows of the weight times t, in int8

Compared with `onnxruntime.quantization.quantize_dynamic`, which has one scale for all tokens:

Accuracy comes from per-token scales, GPTQ (`quantization/rounding.py`) and smoothing. Per-token scales cost time, which
is regained by keeping residual sums out of onnxruntime 1.31's SkipLayerNormalization: it took .50 ms for 4 x 64 tokens,
a Sum and a LayerNormalization .11 ms (one profile each, on a busy machine).

Smoothing divides input columns with outliers by t and multiplies the weight's rows by it: t = max(1, a / c)^e, where a
is the largest |x| of a column, and c and e are searched for the least error of the layer's output. If the input comes
from a LayerNormalization, a second one with divided constants computes x'. Xiao, Lin, Seznec, Wu, Demouth, Han 2023,
"SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models", arXiv 2211.10438; scales by
token: Yao et al. 2022, "ZeroQuant", arXiv 2206.01861.

Measured on MiniLM, cosine of sentence embeddings on 1,024 texts, calibrated on 128 others: .9992 (worst .9968),
onnxruntime's dynamic int8 .9921 (.9785); on 256 texts without smoothing .9972 (.9915) against .9992 (.9978) with it.
Time: the same as dynamic int8, within the noise of a busy machine.

onnxruntime's kernels (MLAS) depend on the CPU. With only AVX2 they add pairs of products in 16 bits, which can
overflow: there weights have 7 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper
from torch import Tensor

from shoestring.compression.onnx.check import run_session, session
from shoestring.compression.onnx.convolutions import Convolutions, is_convolution, quantize_convolutions
from shoestring.compression.onnx.export import Version
from shoestring.compression.onnx.graph import CONTRIB, Graph, make_node
from shoestring.compression.quantization.rounding import gptq_one_grid, nearest_codes

TOLERANCE = (
    0.15  # relative to the outputs' norm: MiniLM has .046 (.09 including padding tokens, whose outputs are unused)
)
CONVOLUTIONS_TOLERANCE = 0.05  # larger differences put convolutions back to float32
LEAST = 64  # rows and columns of the smallest weight that is quantized
ROWS = 1024  # input rows used to search for smoothing
TABLE = 1 << 16  # parameters of the smallest embedding that is stored in int8
SHARES = (1.0, 0.99, 0.97, 0.9, 0.75, 0.5, 0.25)  # candidates for c: quantiles of the columns' largest |x|
EXPONENTS = (1.0, 0.75, 0.5)  # candidates for e
GAIN = 2.0  # factor by which smoothing must reduce the error to be worth an additional operator


@dataclass(frozen=True)
class LayerInputs:
    """Calibration statistics of a layer's input."""

    sample: Tensor  # some rows
    moment: Tensor  # sum of x x^T, up to a factor
    largest: Tensor  # largest |x| per column


def quantize_to_int8(
    model: onnx.ModelProto,
    feeds: Sequence[Mapping[str, Tensor]],
    wide: bool | None = None,
    convolutions: Convolutions = Convolutions.INT8,
) -> tuple[onnx.ModelProto, list[str]]:
    """Quantize the linear layers and convolutions of a float32 model to int8. `feeds`: inputs by name, for calibration.
    `wide`: the CPU accumulates in 32 bits."""
    graph = Graph(model)
    top = 127 if (adds_in_32_bits() if wide is None else wide) else 63
    told = quantize_convolutions(graph, feeds, convolutions, top)
    constants_as_right_operand(graph)
    layers = linear_layers(graph)
    tables = [node for node in graph.nodes if is_table(graph, node)]
    if not layers and not tables:
        return graph.proto(), told or [
            "fast: no linear layer of constants with at least 64 rows and columns and no large convolution, so nothing computes in int8"
        ]
    seen = record_inputs(graph, list(layers), feeds)
    smoothed = sum(quantize(graph, x, nodes, seen[x], top) for x, nodes in layers.items())
    for node in tables:
        quantize_table(graph, node)
    separate_sums(graph)
    count = sum(map(len, layers.values()))
    return graph.proto(), [
        *told,
        f"fast: {count} linear layers in int8 with a scale for each token, {smoothed} of {len(layers)} inputs smoothed, "
        f"{len(tables)} embeddings in int8, calibrated on {len(feeds)} batches",
    ]


def int8_versions(model: onnx.ModelProto, feeds: Sequence[Mapping[str, Tensor]]) -> Iterator[Version]:
    """Int8 versions of the model, the fastest first; each later one is closer to the float32 model."""
    some = any(is_convolution(graph, node) for graph in [Graph(model)] for node in graph.nodes)
    for convolutions in Convolutions if some else [Convolutions.FLOAT]:
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        graph, notes = quantize_to_int8(copy, feeds, convolutions=convolutions)
        yield Version(graph, TOLERANCE if convolutions is Convolutions.FLOAT else CONVOLUTIONS_TOLERANCE, tuple(notes))


def adds_in_32_bits() -> bool:
    """Whether the CPU's int8 products accumulate without overflow (VNNI, or not x86)."""
    found = torch.cpu.get_capabilities()
    return not found.get("avx2", False) or bool(found.get("avx512_vnni", False) or found.get("avx_vnni", False))


# What is there


def constants_as_right_operand(graph: Graph) -> None:
    """Rewrite MatMul(x, Transpose(W)) and Gemm as MatMul(x, constant) and Add of the bias."""
    graph.fold_transposes()
    for node in list(graph.nodes):
        if (
            node.op_type == "Gemm"
            and is_matrix(graph, node.input[1])
            and min(graph.array(node.input[1]).shape) >= LEAST
        ):
            given = {one.name: helper.get_attribute_value(one) for one in node.attribute}
            if given.get("transA", 0) or given.get("alpha", 1.0) != 1.0 or given.get("beta", 1.0) != 1.0:
                continue
            turned = given.get("transB", 0)
            weight = (
                graph.constant(f"{node.input[1]}_turned", graph.array(node.input[1]).T) if turned else node.input[1]
            )
            biased, output = len(node.input) > 2, node.output[0]
            graph.instead(
                node,
                [
                    make_node("MatMul", [node.input[0], weight], f"{output}_product" if biased else output),
                    *([make_node("Add", [f"{output}_product", node.input[2]], output)] if biased else []),
                ],
            )


def is_matrix(graph: Graph, name: str) -> bool:
    return (
        name in graph.constants
        and len(graph.constants[name].dims) == 2
        and graph.constants[name].data_type == TensorProto.FLOAT
    )


def linear_layers(graph: Graph) -> dict[str, list[onnx.NodeProto]]:
    """MatMul nodes with a large enough constant, by the name of their input."""
    found: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.nodes:
        if (
            node.op_type == "MatMul"
            and is_matrix(graph, node.input[1])
            and min(graph.constants[node.input[1]].dims) >= LEAST
        ):
            found.setdefault(node.input[0], []).append(node)
    return found


def record_inputs(graph: Graph, names: Sequence[str], feeds: Sequence[Mapping[str, Tensor]]) -> dict[str, LayerInputs]:
    """Run the float32 model on the feeds and record statistics of inner tensors."""
    runner = session(graph.with_outputs(names))
    parts: dict[str, list[LayerInputs]] = {name: [] for name in names}
    draw = torch.Generator().manual_seed(0)
    for feed in feeds:
        for name, value in zip(names, run_session(runner, feed), strict=True):
            rows = torch.from_numpy(value).reshape(-1, value.shape[-1])
            chosen = torch.randperm(len(rows), generator=draw)[: max(1, ROWS // len(feeds))]
            parts[name].append(LayerInputs(rows[chosen], rows.T @ rows, rows.abs().amax(0)))
    return {
        name: LayerInputs(
            torch.cat([one.sample for one in found]),
            torch.stack([one.moment for one in found]).mean(0),
            torch.stack([one.largest for one in found]).amax(0),
        )
        for name, found in parts.items()
    }


# Int8


def quantize(graph: Graph, x: str, nodes: Sequence[onnx.NodeProto], seen: LayerInputs, top: int) -> bool:
    """Quantize all layers that read the same tensor; returns whether their input is smoothed."""
    weights = [torch.from_numpy(graph.array(node.input[1]).T.copy()) for node in nodes]  # (out, in)
    before = graph.maker(x)
    free = before is not None and is_norm(graph, before)
    best, plain, smoothing = search_smoothing(torch.cat(weights), seen, top)
    smooth = best * (1.0 if free else GAIN) < plain
    divisor = smoothing if smooth else torch.ones_like(smoothing)
    first = next(
        node for node in graph.nodes if x in node.input
    )  # of all users: the new tensors are needed from there on
    new, source = divide_nodes(graph, x, before if free else None, divisor) if smooth else ([], x)
    new += token_scale_nodes(graph, source)
    graph.instead(first, [*new, first])
    moment = seen.moment / divisor[:, None] / divisor[None]
    for node, weight in zip(nodes, weights, strict=True):
        codes, scales = round_rows_to_int8(weight * divisor, top, moment)
        output = node.output[0]
        graph.constant(f"{output}_codes", codes.T.numpy())
        graph.constant(f"{output}_scales", scales.numpy())
        inputs = [
            f"{source}_int8",
            f"{output}_codes",
            "step_of_127",
            f"{output}_scales",
            "zero_of_128",
            graph.constant("zero_of_int8", np.int8(0)),
        ]
        graph.instead(
            node,
            [
                make_node("MatMulIntegerToFloat", inputs, f"{output}_int8", CONTRIB),
                make_node("Mul", [f"{output}_int8", f"{source}_largest"], output),
            ],
        )
    return smooth


def search_smoothing(weight: Tensor, seen: LayerInputs, top: int) -> tuple[float, float, Tensor]:
    """Search for smoothing: the least output error, the error without smoothing, and the best divisors."""
    sample, largest = seen.sample, seen.largest.clamp(min=1e-6)
    wanted = sample @ weight.T

    def error(divisor: Tensor) -> float:
        scaled = weight * divisor
        steps = scaled.abs().amax(1, keepdim=True).clamp(min=1e-12) / top
        return float(
            (round_per_token(sample / divisor) @ ((scaled / steps).round() * steps).T - wanted).square().mean()
        )

    plain = error(torch.ones_like(largest))
    best, found = plain, torch.ones_like(largest)
    for share in SHARES[1:]:
        for exponent in EXPONENTS:
            divisor = (largest / largest.quantile(share)).clamp(min=1.0) ** exponent
            if (now := error(divisor)) < best:
                best, found = now, divisor
    return best, plain, found


def round_per_token(x: Tensor) -> Tensor:
    """
    >>> round_per_token(torch.tensor([[127.0, 0.4], [1.27, 0.004]]))
    tensor([[127.0000,   0.0000],
            [  1.2700,   0.0000]])
    """
    step = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return (x / step).round() * step


def round_rows_to_int8(weight: Tensor, top: int, moment: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes from -top to top, rounded with GPTQ if a moment is given, and a scale per row."""
    scales = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / top
    spread, zeros, limit = (
        scales.expand_as(weight).contiguous(),
        torch.full_like(weight, float(top)),
        torch.full((len(weight), 1), 2.0 * top),
    )
    codes = (
        nearest_codes(weight, spread, zeros, limit)
        if moment is None
        else gptq_one_grid(weight.clone(), spread, zeros, limit, moment, None)
    )
    return (codes - top).to(torch.int8), scales[:, 0]


def is_norm(graph: Graph, node: onnx.NodeProto) -> bool:
    return (
        node.op_type == "LayerNormalization"
        and all(name in graph.constants for name in node.input[1:])
        and len(graph.array(node.input[1]).shape) == 1
    )


def divide_nodes(
    graph: Graph, x: str, norm: onnx.NodeProto | None, divisor: Tensor
) -> tuple[list[onnx.NodeProto], str]:
    """Nodes that compute x / divisor, and the name of the result."""
    name, by = f"{x}_smoothed", divisor.numpy()
    if norm is None:
        return [make_node("Mul", [x, graph.constant(f"{x}_smoothing", (1 / by).astype(np.float32))], name)], name
    constants = [graph.constant(f"{one}_by_{x}", (graph.array(one) / by).astype(np.float32)) for one in norm.input[1:]]
    twin = onnx.NodeProto()
    twin.CopyFrom(norm)
    del twin.input[1:], twin.output[:]
    twin.input.extend(constants)
    twin.output.append(name)
    twin.name = f"made_{name}"
    return [twin], name


def token_scale_nodes(graph: Graph, x: str) -> list[onnx.NodeProto]:
    """Nodes that quantize x to bytes per token, and compute the largest |x| of each token."""
    axes = graph.constant("last_dimension", np.array([-1], np.int64))
    step, zero = graph.constant("step_of_127", np.float32(1 / 127)), graph.constant("zero_of_128", np.uint8(128))
    least = graph.constant("least_of_a_token", np.float32(1e-12))
    return [
        make_node("Abs", [x], f"{x}_abs"),
        make_node("ReduceMax", [f"{x}_abs", axes], f"{x}_most", keepdims=1),
        make_node("Max", [f"{x}_most", least], f"{x}_largest"),
        make_node("Div", [x, f"{x}_largest"], f"{x}_share"),
        make_node("QuantizeLinear", [f"{x}_share", step, zero], f"{x}_int8"),
    ]


# Embeddings and sums


def is_table(graph: Graph, node: onnx.NodeProto) -> bool:
    if (
        node.op_type != "Gather"
        or not is_matrix(graph, node.input[0])
        or any(one.i for one in node.attribute if one.name == "axis")
    ):
        return False
    return int(np.prod(graph.constants[node.input[0]].dims)) >= TABLE


def quantize_table(graph: Graph, node: onnx.NodeProto) -> None:
    """Store an embedding in int8 with a scale per row; rows are dequantized when they are looked up."""
    name, index, output = node.input[0], node.input[1], node.output[0]
    codes, scales = round_rows_to_int8(torch.from_numpy(graph.array(name).copy()), 127, None)
    graph.constant(f"{name}_codes", codes.numpy())
    graph.constant(f"{name}_scales", scales[:, None].numpy())
    graph.instead(
        node,
        [
            make_node("Gather", [f"{name}_codes", index], f"{output}_codes", axis=0),
            make_node("Gather", [f"{name}_scales", index], f"{output}_scales", axis=0),
            make_node("Cast", [f"{output}_codes"], f"{output}_float", to=TensorProto.FLOAT),
            make_node("Mul", [f"{output}_float", f"{output}_scales"], output),
        ],
    )


def separate_sums(graph: Graph) -> None:
    """Replace Add before LayerNormalization by Sum, which onnxruntime does not fuse with it."""
    for node in list(graph.nodes):
        users = graph.users(node.output[0])
        if (
            node.op_type == "Add"
            and users
            and any(one.op_type == "LayerNormalization" for one in users)
            and not any(name in graph.constants for name in node.input)
        ):
            graph.instead(node, [make_node("Sum", list(node.input), node.output[0])])
