"""Int8: linear layers compute with whole numbers of 8 bits in onnxruntime, each token on a scale of its own.

    y = m ((round(127 x' / m) Q) s / 127)        x' = x / t,  m = max |x'| of the token,  Q s = rows of the weight times t, in int8

What makes up for the time that scales by token cost, against `onnxruntime.quantization.quantize_dynamic` with one scale for all tokens:
a residual sum stays out of onnxruntime 1.31's SkipLayerNormalization, which took .50 ms for 4 x 64 tokens where a Sum and a
LayerNormalization took .11 (a profile of each, on a busy machine).
What makes it more accurate: a scale for each token, rounding that makes up for its errors (`rounding.py`, GPTQ), and smoothing.

Smoothing divides columns with outliers by t and multiplies the weight's rows: t = max(1, a / c)^e with a the largest |x| of a column, and
c and e searched for the least error of the layer's output. Where a LayerNormalization comes before, a second one with its constants
divided gives x'.
Xiao, Lin, Seznec, Wu, Demouth, Han 2023, "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models",
arXiv 2211.10438; scales by token: Yao et al. 2022, "ZeroQuant", arXiv 2206.01861.

Measured on MiniLM, cosine of sentence embeddings on 1,024 texts, calibrated on 128 others: .9992 (worst .9968), onnxruntime's dynamic int8
.9921 (.9785); on 256 texts without smoothing .9972 (.9915) against .9992 (.9978). Time: that of dynamic int8, within what a busy
machine shows.

onnxruntime's kernels (MLAS) choose what the processor has. Those of processors with AVX2 alone add pairs of products in 16 bits, which can
overflow: there a weight has 7 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper
from torch import Tensor

from shoestring.compression.onnx.check import ran, session
from shoestring.compression.onnx.convolutions import Convolutions, is_convolution, quantize_convolutions
from shoestring.compression.onnx.export import Version
from shoestring.compression.onnx.graph import CONTRIB, Graph, made
from shoestring.compression.quantization.rounding import gptq_one_grid, nearest_codes

TOLERANCE = 0.15  # of the outputs' norm: MiniLM has .046 (.09 with tokens of padding, whose outputs nobody reads)
CONVOLUTIONS_TOLERANCE = 0.05  # beyond which convolutions go back to float32
LEAST = 64  # rows and columns of a weight that is worth it
ROWS = 1024  # of a layer's inputs, for the search
TABLE = 1 << 16  # numbers of an embedding that is stored in int8
SHARES = (1.0, 0.99, 0.97, 0.9, 0.75, 0.5, 0.25)  # of the columns whose largest is below c
EXPONENTS = (1.0, 0.75, 0.5)
GAIN = 2.0  # times less error that pay for one more operation


@dataclass(frozen=True)
class Inputs:
    """What calibration shows of the tensor that a layer multiplies."""

    sample: Tensor  # rows of it
    moment: Tensor  # sum of x x^T, up to a factor
    largest: Tensor  # |x|, by column


def accelerated(
    model: onnx.ModelProto,
    feeds: Sequence[Mapping[str, Tensor]],
    wide: bool | None = None,
    convolutions: Convolutions = Convolutions.INT8,
) -> tuple[onnx.ModelProto, list[str]]:
    """A float32 model with its linear layers and convolutions in int8. `feeds`: inputs by name, to calibrate with. `wide`: the processor
    adds in 32 bits."""
    graph = Graph(model)
    top = 127 if (adds_in_32_bits() if wide is None else wide) else 63
    told = quantize_convolutions(graph, feeds, convolutions, top)
    constants_last(graph)
    layers = linear_layers(graph)
    tables = [node for node in graph.nodes if is_table(graph, node)]
    if not layers and not tables:
        return graph.proto(), told or [
            "fast: no linear layer of constants with at least 64 rows and columns and no large convolution, so nothing computes in int8"
        ]
    seen = recorded(graph, list(layers), feeds)
    smoothed = sum(quantize(graph, x, nodes, seen[x], top) for x, nodes in layers.items())
    for node in tables:
        table_in_int8(graph, node)
    separate_sums(graph)
    count = sum(map(len, layers.values()))
    return graph.proto(), [
        *told,
        f"fast: {count} linear layers in int8 with a scale for each token, {smoothed} of {len(layers)} inputs smoothed, "
        f"{len(tables)} embeddings in int8, calibrated on {len(feeds)} batches",
    ]


def int8_versions(model: onnx.ModelProto, feeds: Sequence[Mapping[str, Tensor]]) -> Iterator[Version]:
    """The model in int8: the fastest first, each one after it closer to the float32 model."""
    some = any(is_convolution(graph, node) for graph in [Graph(model)] for node in graph.nodes)
    for convolutions in Convolutions if some else [Convolutions.FLOAT]:
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        graph, notes = accelerated(copy, feeds, convolutions=convolutions)
        yield Version(graph, TOLERANCE if convolutions is Convolutions.FLOAT else CONVOLUTIONS_TOLERANCE, tuple(notes))


def adds_in_32_bits() -> bool:
    """Whether the processor multiplies and adds bytes without overflow (VNNI, or no x86 at all)."""
    found = torch.cpu.get_capabilities()
    return not found.get("avx2", False) or bool(found.get("avx512_vnni", False) or found.get("avx_vnni", False))


# What is there


def constants_last(graph: Graph) -> None:
    """MatMul(x, Transpose(W)) and Gemm as MatMul of a constant, and Add of the bias."""
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
                    made("MatMul", [node.input[0], weight], f"{output}_product" if biased else output),
                    *([made("Add", [f"{output}_product", node.input[2]], output)] if biased else []),
                ],
            )


def is_matrix(graph: Graph, name: str) -> bool:
    return (
        name in graph.constants
        and len(graph.constants[name].dims) == 2
        and graph.constants[name].data_type == TensorProto.FLOAT
    )


def linear_layers(graph: Graph) -> dict[str, list[onnx.NodeProto]]:
    """Products with a constant that is large enough, by the name of what is multiplied."""
    found: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.nodes:
        if (
            node.op_type == "MatMul"
            and is_matrix(graph, node.input[1])
            and min(graph.constants[node.input[1]].dims) >= LEAST
        ):
            found.setdefault(node.input[0], []).append(node)
    return found


def recorded(graph: Graph, names: Sequence[str], feeds: Sequence[Mapping[str, Tensor]]) -> dict[str, Inputs]:
    """Run the model as it is, and look at tensors within."""
    runner = session(graph.watched(names))
    parts: dict[str, list[Inputs]] = {name: [] for name in names}
    draw = torch.Generator().manual_seed(0)
    for feed in feeds:
        for name, value in zip(names, ran(runner, feed), strict=True):
            rows = torch.from_numpy(value).reshape(-1, value.shape[-1])
            chosen = torch.randperm(len(rows), generator=draw)[: max(1, ROWS // len(feeds))]
            parts[name].append(Inputs(rows[chosen], rows.T @ rows, rows.abs().amax(0)))
    return {
        name: Inputs(
            torch.cat([one.sample for one in found]),
            torch.stack([one.moment for one in found]).mean(0),
            torch.stack([one.largest for one in found]).amax(0),
        )
        for name, found in parts.items()
    }


# Int8


def quantize(graph: Graph, x: str, nodes: Sequence[onnx.NodeProto], seen: Inputs, top: int) -> bool:
    """Layers that multiply the same tensor; gives whether it is smoothed."""
    weights = [torch.from_numpy(graph.array(node.input[1]).T.copy()) for node in nodes]  # (out, in)
    before = graph.maker(x)
    free = before is not None and is_norm(graph, before)
    best, plain, smoothing = searched(torch.cat(weights), seen, top)
    smooth = best * (1.0 if free else GAIN) < plain
    divisor = smoothing if smooth else torch.ones_like(smoothing)
    first = next(
        node for node in graph.nodes if x in node.input
    )  # of all users: the new tensors are needed from there on
    new, source = divided(graph, x, before if free else None, divisor) if smooth else ([], x)
    new += token_scaled(graph, source)
    graph.instead(first, [*new, first])
    moment = seen.moment / divisor[:, None] / divisor[None]
    for node, weight in zip(nodes, weights, strict=True):
        codes, scales = rounded_rows(weight * divisor, top, moment)
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
                made("MatMulIntegerToFloat", inputs, f"{output}_int8", CONTRIB),
                made("Mul", [f"{output}_int8", f"{source}_largest"], output),
            ],
        )
    return smooth


def searched(weight: Tensor, seen: Inputs, top: int) -> tuple[float, float, Tensor]:
    """The least error of the output, that without smoothing, and the divisors of the least."""
    sample, largest = seen.sample, seen.largest.clamp(min=1e-6)
    wanted = sample @ weight.T

    def error(divisor: Tensor) -> float:
        scaled = weight * divisor
        steps = scaled.abs().amax(1, keepdim=True).clamp(min=1e-12) / top
        return float((token_rounded(sample / divisor) @ ((scaled / steps).round() * steps).T - wanted).square().mean())

    plain = error(torch.ones_like(largest))
    best, found = plain, torch.ones_like(largest)
    for share in SHARES[1:]:
        for exponent in EXPONENTS:
            divisor = (largest / largest.quantile(share)).clamp(min=1.0) ** exponent
            if (now := error(divisor)) < best:
                best, found = now, divisor
    return best, plain, found


def token_rounded(x: Tensor) -> Tensor:
    """
    >>> token_rounded(torch.tensor([[127.0, 0.4], [1.27, 0.004]]))
    tensor([[127.0000,   0.0000],
            [  1.2700,   0.0000]])
    """
    step = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return (x / step).round() * step


def rounded_rows(weight: Tensor, top: int, moment: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes from -top to top with a scale for each row, and the scales."""
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


def divided(graph: Graph, x: str, norm: onnx.NodeProto | None, divisor: Tensor) -> tuple[list[onnx.NodeProto], str]:
    """Nodes that give x / divisor, and its name."""
    name, by = f"{x}_smoothed", divisor.numpy()
    if norm is None:
        return [made("Mul", [x, graph.constant(f"{x}_smoothing", (1 / by).astype(np.float32))], name)], name
    constants = [graph.constant(f"{one}_by_{x}", (graph.array(one) / by).astype(np.float32)) for one in norm.input[1:]]
    twin = onnx.NodeProto()
    twin.CopyFrom(norm)
    del twin.input[1:], twin.output[:]
    twin.input.extend(constants)
    twin.output.append(name)
    twin.name = f"made_{name}"
    return [twin], name


def token_scaled(graph: Graph, x: str) -> list[onnx.NodeProto]:
    """x as bytes, and the largest |x| of each token."""
    axes = graph.constant("last_dimension", np.array([-1], np.int64))
    step, zero = graph.constant("step_of_127", np.float32(1 / 127)), graph.constant("zero_of_128", np.uint8(128))
    least = graph.constant("least_of_a_token", np.float32(1e-12))
    return [
        made("Abs", [x], f"{x}_abs"),
        made("ReduceMax", [f"{x}_abs", axes], f"{x}_most", keepdims=1),
        made("Max", [f"{x}_most", least], f"{x}_largest"),
        made("Div", [x, f"{x}_largest"], f"{x}_share"),
        made("QuantizeLinear", [f"{x}_share", step, zero], f"{x}_int8"),
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


def table_in_int8(graph: Graph, node: onnx.NodeProto) -> None:
    """An embedding in int8 with a scale for each row; rows that are looked up become numbers again."""
    name, index, output = node.input[0], node.input[1], node.output[0]
    codes, scales = rounded_rows(torch.from_numpy(graph.array(name).copy()), 127, None)
    graph.constant(f"{name}_codes", codes.numpy())
    graph.constant(f"{name}_scales", scales[:, None].numpy())
    graph.instead(
        node,
        [
            made("Gather", [f"{name}_codes", index], f"{output}_codes", axis=0),
            made("Gather", [f"{name}_scales", index], f"{output}_scales", axis=0),
            made("Cast", [f"{output}_codes"], f"{output}_float", to=TensorProto.FLOAT),
            made("Mul", [f"{output}_float", f"{output}_scales"], output),
        ],
    )


def separate_sums(graph: Graph) -> None:
    """Add before LayerNormalization as Sum, which onnxruntime does not fuse with it."""
    for node in list(graph.nodes):
        users = graph.users(node.output[0])
        if (
            node.op_type == "Add"
            and users
            and any(one.op_type == "LayerNormalization" for one in users)
            and not any(name in graph.constants for name in node.input)
        ):
            graph.instead(node, [made("Sum", list(node.input), node.output[0])])
