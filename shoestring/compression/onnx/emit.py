"""Write packed weights into an ONNX graph, with the operators that dequantize them.

    use of the weight                       grid                                    codebook                 float16
    embedding lookup                        GatherBlockQuantized, or Gather of      Gather of codes, then    Gather, Cast
                                            codes, then scale (code - zero)         of the table
    linear layer (blocks 16 ... 256)        MatMulNBits                             as elsewhere             as elsewhere
    elsewhere                               DequantizeLinear in blocks              Gather of the table      Cast

ONNX has integers of 4 and 8 bits: codes of 2 and 3 bits are stored in 4, those of 5 to 7 in 8. Other formats are
written as dense float32, with a message.
"""

from __future__ import annotations

from math import prod

import numpy as np
import onnx
import torch
from onnx import TensorProto

from shoestring.compression.formats.codebook import CodebookFormat
from shoestring.compression.formats.format import PlainFormat, WeightFormat
from shoestring.compression.formats.grid import GridFormat, grid_shape, matrix_shape
from shoestring.compression.onnx.graph import CONTRIB, Array, Graph, make_node, nibble_stream
from shoestring.numerics.bit_packing import unpack_bits

BLOCKS = (16, 32, 64, 128, 256)  # block sizes that onnxruntime's blockwise operators support


def write_weight(graph: Graph, name: str, form: WeightFormat | torch.Tensor) -> list[str]:
    """Write the weight `name` into the graph. Returns a message if it takes more bytes than the packed weight."""
    if isinstance(form, torch.Tensor) or (isinstance(form, PlainFormat) and not form.settings.get("stored")):
        graph.constant(name, (form if isinstance(form, torch.Tensor) else form.get_buffer("values")).numpy())
        return []
    if form.dtype != torch.float32 or not isinstance(form, (PlainFormat, GridFormat, CodebookFormat)):
        dense = form.dense().float().numpy()
        graph.constant(name, dense)
        return [
            f"{name}: a form of kind {form.kind} ({form.dtype}) has no operator in ONNX: written dense, "
            f"{dense.nbytes:,} bytes instead of {form.stored_bytes:,}"
        ]
    before = sum(len(one.raw_data) for one in graph.constants.values())
    for node in graph.users(name):
        looked_up = node.op_type == "Gather" and node.input[0] == name and axis_of(node) == 0
        if looked_up and len(form.shape) == 2 and not inputs_first(form):
            rewrite_lookup(graph, name, form, node)
        elif isinstance(form, GridFormat) and has_supported_blocks(form):
            rewrite_linear(graph, name, form, node)
    if graph.users(name) or graph.is_output(name):
        graph.instead(None, dense_nodes(graph, name, form))
    took = sum(len(one.raw_data) for one in graph.constants.values()) - before
    more = took > 1.02 * form.stored_bytes + 256
    return (
        [f"{name}: {took:,} bytes instead of {form.stored_bytes:,} ({form.extra_repr()}; ONNX has 4 and 8 bits)"]
        if more
        else []
    )


def axis_of(node: onnx.NodeProto) -> int:
    return next((one.i for one in node.attribute if one.name == "axis"), 0)


def has_supported_blocks(form: GridFormat) -> bool:
    return (
        len(form.shape) == 2
        and int(form.settings["group"]) in BLOCKS
        and codes_shape(form)[1] % int(form.settings["group"]) == 0
    )


def codes_shape(form: GridFormat | CodebookFormat) -> tuple[int, int]:
    """Rows and columns of the codes."""
    return grid_shape(form.shape, form.settings) if isinstance(form, GridFormat) else matrix_shape(form.shape)


def inputs_first(form: WeightFormat) -> bool:
    """Whether the codes' rows are those of W^T, for a weight that is multiplied as x W."""
    return form.settings.get("transposed") is True


def onnx_bits(bits: int) -> int:
    """Bits of the ONNX integer type that holds codes of this many bits."""
    return 4 if bits <= 4 else 8


# Constants


def codes_of(form: GridFormat | CodebookFormat) -> Array:
    rows, columns = codes_shape(form)
    return unpack_bits(form.get_buffer("codes"), int(form.settings["bits"]), rows * columns).view(rows, columns).numpy()


def codes_constant(graph: Graph, name: str, form: GridFormat | CodebookFormat) -> str:
    """The codes (rows, columns), in 4 or 8 bits."""
    codes = codes_of(form)
    if onnx_bits(int(form.settings["bits"])) == 4:
        return graph.nibbles(f"{name}_codes4", nibble_stream(codes), codes.shape)
    return graph.constant(f"{name}_codes", codes)


def row_bytes_constant(graph: Graph, name: str, codes: Array, bits: int) -> str:
    """Codes (rows, columns) packed so that every row starts at a byte."""
    if onnx_bits(bits) == 8:
        return graph.constant(name, codes)
    even = np.zeros((len(codes), codes.shape[1] + codes.shape[1] % 2), np.uint8)
    even[:, : codes.shape[1]] = codes
    return graph.constant(name, even[:, 0::2] | (even[:, 1::2] << 4))


def float_scales(graph: Graph, name: str, form: GridFormat | CodebookFormat) -> tuple[str, list[onnx.NodeProto]]:
    graph.constant(f"{name}_scales", form.get_buffer("scales").numpy())
    cast = f"{name}_scales_float"
    return cast, [] if graph.maker(cast) else [make_node("Cast", [f"{name}_scales"], cast, to=TensorProto.FLOAT)]


# Linear layers and embedding lookups


def rewrite_linear(graph: Graph, name: str, form: GridFormat, node: onnx.NodeProto) -> None:
    """Rewrite MatMul(x, Transpose(weight)) or Gemm(x, weight, bias) as MatMulNBits; for a weight with inputs first,
    MatMul(x, weight)."""
    if inputs_first(form) and node.op_type == "MatMul" and node.input[1] == name and node.input[0] != name:
        graph.instead(node, matmul_nbits_nodes(graph, name, form, node.input[0], "", node.output[0]))
    elif (
        not inputs_first(form)
        and node.op_type == "Transpose"
        and all(one.op_type == "MatMul" and one.input[1] == node.output[0] for one in graph.users(node.output[0]))
    ):
        for user in graph.users(node.output[0]):
            graph.instead(user, matmul_nbits_nodes(graph, name, form, user.input[0], "", user.output[0]))
        graph.nodes = [one for one in graph.nodes if one is not node]
    elif (
        node.op_type == "Gemm"
        and node.input[1] == name
        and name not in (node.input[0], *node.input[2:])
        and plain_gemm(node, transposed=not inputs_first(form))
    ):
        bias = node.input[2] if len(node.input) > 2 else ""
        graph.instead(node, matmul_nbits_nodes(graph, name, form, node.input[0], bias, node.output[0]))


def plain_gemm(node: onnx.NodeProto, transposed: bool) -> bool:
    """Whether a Gemm computes exactly x W^T + b, or x W + b if not `transposed`."""
    found = {one.name: one.f if one.type == onnx.AttributeProto.FLOAT else one.i for one in node.attribute}
    return (found.get("transB", 0), found.get("transA", 0), found.get("alpha", 1.0), found.get("beta", 1.0)) == (
        int(transposed),
        0,
        1.0,
        1.0,
    )


def matmul_nbits_nodes(
    graph: Graph, name: str, form: GridFormat, x: str, bias: str, output: str
) -> list[onnx.NodeProto]:
    rows, columns = codes_shape(form)
    bits, group = onnx_bits(int(form.settings["bits"])), int(form.settings["group"])
    blocks = columns // group
    codes = row_bytes_constant(graph, f"{name}_bytes", codes_of(form), bits)
    zeros = row_bytes_constant(graph, f"{name}_zeros_bytes", form.zero_points().numpy(), bits)
    scales, before = float_scales(graph, name, form)
    shape = graph.constant(f"{name}_blocks", np.array([rows, blocks, group * bits // 8], np.int64))
    flat = graph.constant("shape_of_a_vector", np.array([-1], np.int64))
    nodes = [
        *before,
        make_node("Reshape", [codes, shape], f"{output}_codes"),
        make_node("Reshape", [scales, flat], f"{output}_scales"),
        make_node("Reshape", [zeros, flat], f"{output}_zeros"),
        make_node(
            "MatMulNBits",
            [x, f"{output}_codes", f"{output}_scales", f"{output}_zeros"],
            f"{output}_product" if bias else output,
            CONTRIB,
            K=columns,
            N=rows,
            bits=bits,
            block_size=group,
        ),
    ]
    return [*nodes, make_node("Add", [f"{output}_product", bias], output)] if bias else nodes


def rewrite_lookup(
    graph: Graph, name: str, form: GridFormat | CodebookFormat | PlainFormat, node: onnx.NodeProto
) -> None:
    index, output = node.input[1], node.output[0]
    if isinstance(form, PlainFormat):
        graph.constant(f"{name}_stored", numpy_values(form))
        nodes = [
            make_node("Gather", [f"{name}_stored", index], f"{output}_stored", axis=0),
            make_node("Cast", [f"{output}_stored"], output, to=TensorProto.FLOAT),
        ]
    elif isinstance(form, GridFormat) and has_supported_blocks(form):
        bits = int(form.settings["bits"])
        codes = row_bytes_constant(graph, f"{name}_bytes", codes_of(form), bits)
        zeros = row_bytes_constant(graph, f"{name}_zeros_bytes", form.zero_points().numpy(), bits)
        scales, before = float_scales(graph, name, form)
        nodes = [
            *before,
            make_node(
                "GatherBlockQuantized",
                [codes, index, scales, zeros],
                output,
                CONTRIB,
                bits=onnx_bits(bits),
                gather_axis=0,
                quantize_axis=1,
                block_size=int(form.settings["group"]),
            ),
        ]
    else:
        nodes = gather_nodes(graph, name, form, index, output)
    graph.instead(node, nodes)


def gather_nodes(
    graph: Graph, name: str, form: GridFormat | CodebookFormat, index: str, output: str
) -> list[onnx.NodeProto]:
    """Nodes that gather rows of codes and dequantize them. Codes take a byte each, because Gather can't read 4-bit
    rows."""
    graph.constant(f"{name}_codes", codes_of(form))
    nodes = [make_node("Gather", [f"{name}_codes", index], f"{output}_codes", axis=0)]
    value = f"{output}_values"
    if isinstance(form, CodebookFormat):
        nodes += [
            make_node("Cast", [f"{output}_codes"], f"{output}_index", to=TensorProto.INT32),
            *table_nodes(graph, name, form, f"{output}_index", value),
        ]
    else:
        graph.constant(f"{name}_zeros", form.zero_points().numpy())
        nodes += [
            make_node("Gather", [f"{name}_zeros", index], f"{output}_zeros", axis=0),
            *per_column_nodes(graph, form, f"{output}_zeros", f"{output}_zeros_wide"),
            make_node("Cast", [f"{output}_zeros_wide"], f"{output}_zeros_float", to=TensorProto.FLOAT),
            make_node("Cast", [f"{output}_codes"], f"{output}_float", to=TensorProto.FLOAT),
            make_node("Sub", [f"{output}_float", f"{output}_zeros_float"], value),
        ]
    if "scales" not in form.tensors():
        return [*nodes, make_node("Identity", [value], output)]
    graph.constant(f"{name}_scales", form.get_buffer("scales").numpy())
    return [
        *nodes,
        make_node("Gather", [f"{name}_scales", index], f"{output}_scales", axis=0),
        make_node("Cast", [f"{output}_scales"], f"{output}_scales_float", to=TensorProto.FLOAT),
        *per_column_nodes(graph, form, f"{output}_scales_float", f"{output}_scales_wide"),
        make_node("Mul", [value, f"{output}_scales_wide"], output),
    ]


def per_column_nodes(graph: Graph, form: WeightFormat, groups: str, output: str) -> list[onnx.NodeProto]:
    """Nodes that repeat per-group values for each column."""
    columns, group = matrix_shape(form.shape)[1], int(form.settings["group"])
    place = graph.constant(f"group_of_{columns}_by_{group}", np.arange(columns, dtype=np.int64) // group)
    return [make_node("Gather", [groups, place], output, axis=-1)]


def table_nodes(graph: Graph, name: str, form: CodebookFormat, index: str, output: str) -> list[onnx.NodeProto]:
    graph.constant(f"{name}_table", form.get_buffer("values").numpy())
    return [
        make_node("Cast", [f"{name}_table"], f"{output}_table", to=TensorProto.FLOAT),
        make_node("Gather", [f"{output}_table", index], output, axis=0),
    ]


def numpy_values(form: PlainFormat) -> Array:
    """Values as a numpy array; bfloat16, which numpy lacks, becomes float32 without loss."""
    values = form.get_buffer("values")
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()


# Anywhere else


def dense_nodes(graph: Graph, name: str, form: GridFormat | CodebookFormat | PlainFormat) -> list[onnx.NodeProto]:
    """Nodes that dequantize the whole weight."""
    if isinstance(form, PlainFormat):
        graph.constant(f"{name}_stored", numpy_values(form))
        return [make_node("Cast", [f"{name}_stored"], name, to=TensorProto.FLOAT)]
    flat, (rows, columns) = f"{name}_matrix", codes_shape(form)
    shape = graph.constant(f"{name}_shape", np.array(form.shape, np.int64))
    codes = codes_constant(graph, name, form)
    if isinstance(form, GridFormat):
        group = min(int(form.settings["group"]), columns)
        scales, nodes = float_scales(graph, name, form)
        points = form.zero_points().numpy()
        four = onnx_bits(int(form.settings["bits"])) == 4
        zeros = (
            graph.nibbles(f"{name}_zeros4", nibble_stream(points), points.shape)
            if four
            else graph.constant(f"{name}_zeros", points)
        )
        nodes = [*nodes, make_node("DequantizeLinear", [codes, scales, zeros], flat, axis=1, block_size=group)]
    else:
        nodes = [
            make_node("Cast", [codes], f"{name}_index", to=TensorProto.INT32),
            *table_nodes(graph, name, form, f"{name}_index", f"{name}_values"),
        ]
        if "scales" in form.tensors():
            scales, before = float_scales(graph, name, form)
            nodes += [
                *before,
                *per_column_nodes(graph, form, scales, f"{name}_scales_wide"),
                make_node("Mul", [f"{name}_values", f"{name}_scales_wide"], flat),
            ]
        else:
            nodes.append(make_node("Identity", [f"{name}_values"], flat))
    assert prod(form.shape) == rows * columns
    if inputs_first(form):
        nodes.append(make_node("Transpose", [flat], flat := f"{name}_inputs_first", perm=[1, 0]))
    return [*nodes, make_node("Reshape", [flat, shape], name)]
