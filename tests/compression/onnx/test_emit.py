"""Every form in every place of a graph gives the weight's numbers, without torch's exporter."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from shoestring.compression.formats.format import PlainFormat, WeightFormat
from shoestring.compression.formats.grid import GridFormat
from shoestring.numerics.bit_packing import unpack_bits
from tests.compression.onnx.test_export import booked, gridded

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper  # noqa: E402

from shoestring.compression.onnx.check import session  # noqa: E402
from shoestring.compression.onnx.emit import write_weight  # noqa: E402
from shoestring.compression.onnx.graph import Graph  # noqa: E402

FORMS: dict[str, Callable[[Tensor], WeightFormat]] = {
    **{
        f"grid of {bits} by {group}": (lambda weight, bits=bits, group=group: gridded(weight, bits, group))
        for bits, group in ((2, 16), (3, 32), (4, 16), (4, 7), (5, 64), (8, 16), (8, 1000))
    },
    **{
        f"codebook of {bits} by {group}": (lambda weight, bits=bits, group=group: booked(weight, bits, group))
        for bits, group in ((3, 0), (4, 16), (8, 9))
    },
    "float16": lambda weight: PlainFormat.of(weight, "float16"),
    "bfloat16": lambda weight: PlainFormat.of(weight, "bfloat16"),
    "as it is": PlainFormat.of,
}


def graph_of(nodes: list[onnx.NodeProto], inputs: list[tuple[str, int]], shape: tuple[int, ...]) -> Graph:
    values = [helper.make_tensor_value_info(name, kind, None) for name, kind in inputs]
    made = helper.make_graph(nodes, "one", values, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    return Graph(helper.make_model(made, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))


def weight(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_linear_layer_and_a_gemm_multiply_with_the_weight(form: Callable[[Tensor], WeightFormat]) -> None:
    stored, x, bias = form(weight(20, 64)), weight(3, 64), weight(20)
    turned = [helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0]), helper.make_node("MatMul", ["x", "t"], ["y"])]
    gemm = [helper.make_node("Gemm", ["x", "w", "b"], ["y"], transB=1)]
    for nodes, more, wanted in ((turned, [], x @ stored.dense().T), (gemm, ["b"], x @ stored.dense().T + bias)):
        graph = graph_of(nodes, [("x", TensorProto.FLOAT), *((name, TensorProto.FLOAT) for name in more)], (3, 20))
        write_weight(graph, "w", stored)
        found = session(graph.proto().SerializeToString()).run(
            None, {"x": x.numpy(), **({"b": bias.numpy()} if more else {})}
        )[0]
        assert np.allclose(found, wanted.numpy(), atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_an_embedding_looks_rows_up(form: Callable[[Tensor], WeightFormat]) -> None:
    stored, index = form(weight(30, 64)), torch.tensor([[0, 29, 7], [7, 1, 0]])
    graph = graph_of([helper.make_node("Gather", ["w", "i"], ["y"], axis=0)], [("i", TensorProto.INT64)], (2, 3, 64))
    write_weight(graph, "w", stored)
    model = graph.proto()
    found = session(model.SerializeToString()).run(None, {"i": index.numpy()})[0]
    assert np.allclose(found, stored.rows(index).numpy(), atol=1e-6)
    assert (
        not any(one.data_type == TensorProto.FLOAT and np.prod(one.dims) >= 30 * 64 for one in model.graph.initializer)
        or stored.settings.get("stored", "bfloat16") == "bfloat16"
    )


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_convolution_with_an_odd_shape(form: Callable[[Tensor], WeightFormat]) -> None:
    stored, x = form(weight(5, 3, 3, 3)), weight(2, 3, 6, 6)
    graph = graph_of([helper.make_node("Conv", ["x", "w"], ["y"])], [("x", TensorProto.FLOAT)], (2, 5, 4, 4))
    write_weight(graph, "w", stored)
    found = session(graph.proto().SerializeToString()).run(None, {"x": x.numpy()})[0]
    wanted = torch.nn.functional.conv2d(x, stored.dense())
    assert np.allclose(found, wanted.numpy(), atol=1e-4 * float(wanted.abs().max()))


def test_what_takes_more_bytes_is_told() -> None:
    graph = graph_of([helper.make_node("Gather", ["w", "i"], ["y"], axis=0)], [("i", TensorProto.INT64)], (2, 64))
    told = write_weight(graph, "w", gridded(weight(300, 64), 3, 16))
    assert len(told) == 1 and "bytes instead of" in told[0]


@pytest.mark.parametrize(("bits", "group"), [(3, 32), (4, 16), (4, 7), (6, 64), (8, 1000)])
def test_a_weight_whose_inputs_come_first_stays_packed(bits: int, group: int) -> None:
    """GPT-2's Conv1D, and transposed convolutions, were once written in float32."""
    turned = gridded(weight(20, 64), bits, group)
    points = turned.zero_points()
    stored = GridFormat.of(codes(turned), turned.scales, points, bits, group, (64, 20), torch.float32, True)
    x, bias = weight(3, 64), weight(20)
    assert torch.equal(stored.dense(), turned.dense().T)
    product = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    gemm = [helper.make_node("Gemm", ["x", "w", "b"], ["y"], transB=0)]
    lookup = [helper.make_node("Gather", ["w", "i"], ["y"], axis=0)]
    index = torch.tensor([3, 5])
    for nodes, feed, wanted in (
        (product, {"x": x}, x @ stored.dense()),
        (gemm, {"x": x, "b": bias}, x @ stored.dense() + bias),
        (lookup, {"i": index}, stored.dense()[index]),
    ):
        kinds = {name: TensorProto.INT64 if name == "i" else TensorProto.FLOAT for name in feed}
        graph = graph_of(nodes, list(kinds.items()), ())
        assert write_weight(graph, "w", stored) == [] or bits > 4 or bits == 3
        proto = graph.proto()
        blocks = [one for one in proto.graph.node if one.op_type == "MatMulNBits"]
        assert len(blocks) == (nodes is not lookup and group in (16, 32, 64))
        assert all(one.data_type != TensorProto.FLOAT for one in proto.graph.initializer if one.dims)
        found = session(proto.SerializeToString()).run(None, {name: one.numpy() for name, one in feed.items()})[0]
        assert np.allclose(found, wanted.numpy(), atol=1e-4 * float(wanted.abs().max()))


def codes(form: GridFormat) -> Tensor:
    rows, columns = form.shape
    return unpack_bits(form.codes, int(form.settings["bits"]), rows * columns).view(rows, columns)
