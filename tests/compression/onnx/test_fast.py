"""Linear layers in int8 compute nearly the same; outliers are smoothed away."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from shoestring.compression.onnx.check import session  # noqa: E402
from shoestring.compression.onnx.fast import quantize_to_int8, round_rows_to_int8  # noqa: E402


def normed(outlier: float, bias: bool = True) -> onnx.ModelProto:
    """LayerNormalization with one large column, and two layers after it; the sum before it is a residual."""
    draw = np.random.RandomState(0)
    scale = np.ones(96, np.float32)
    scale[5] = outlier
    arrays = {
        "scale": scale,
        "shift": draw.randn(96).astype(np.float32),
        "w": draw.randn(96, 128).astype(np.float32) / 10,
        "v": draw.randn(128, 64).astype(np.float32) / 10,
    }
    nodes = [
        helper.make_node("Add", ["x", "r"], ["s"]),
        helper.make_node("LayerNormalization", ["s", "scale", "shift"], ["n"]),
        helper.make_node("MatMul", ["n", "w"], ["h"]),
        helper.make_node("Relu", ["h"], ["g"]),
        helper.make_node("MatMul", ["g", "v"], ["y"]),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x", "r")]
    graph = helper.make_graph(
        nodes,
        "one",
        values,
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def feed(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(2, 40, 96, generator=draw), "r": torch.randn(2, 40, 96, generator=draw)}


def relative(model: onnx.ModelProto, other: onnx.ModelProto) -> float:
    inputs = {name: value.numpy() for name, value in feed(1).items()}
    first, second = (session(one.SerializeToString()).run(None, inputs)[0] for one in (model, other))
    return float(np.linalg.norm(first - second) / np.linalg.norm(first))


def test_int8_is_close_and_the_residual_stays_out_of_the_fused_norm() -> None:
    model, (fast, notes) = normed(1.0), quantize_to_int8(normed(1.0), [feed(0)])
    kinds = [node.op_type for node in fast.graph.node]
    assert kinds.count("MatMulIntegerToFloat") == 2 and "MatMul" not in kinds and "Sum" in kinds and "Add" not in kinds
    assert relative(model, fast) < 0.02 and "2 linear layers" in notes[0]


def test_an_outlier_is_smoothed_away_by_a_second_norm() -> None:
    model, (fast, _) = normed(60.0), quantize_to_int8(normed(60.0), [feed(0)])
    assert [node.op_type for node in fast.graph.node].count("LayerNormalization") == 1, "the first had no other user"
    harsh, _ = quantize_to_int8(
        normed(60.0), [{name: value * 0 for name, value in feed(0).items()}]
    )  # calibration that shows nothing
    assert relative(model, fast) < 0.5 * relative(model, harsh)


def test_processors_that_overflow_get_seven_bits() -> None:
    model, (fast, _) = normed(1.0), quantize_to_int8(normed(1.0), [feed(0)], wide=False)
    codes = [
        numpy_helper.to_array(one)
        for one in fast.graph.initializer
        if one.data_type == TensorProto.INT8 and len(one.dims) == 2
    ]
    assert (
        len(codes) == 2 and max(np.abs(one.astype(int)).max() for one in codes) <= 63 and relative(model, fast) < 0.04
    )


def test_rounding_with_the_moment_of_the_inputs_is_better_than_to_the_nearest() -> None:
    draw = torch.Generator().manual_seed(0)
    weight, mixed = torch.randn(32, 64, generator=draw), torch.randn(64, 8, generator=draw)
    x = torch.randn(500, 8, generator=draw) @ mixed.T + 0.01 * torch.randn(500, 64, generator=draw)
    error = {}
    for name, moment in (("nearest", None), ("moment", x.T @ x / 500)):
        codes, scales = round_rows_to_int8(weight, 7, moment)
        error[name] = float((x @ (codes * scales[:, None] - weight).T).square().mean())
    assert error["moment"] < 0.5 * error["nearest"]


def test_a_model_without_large_layers_is_told() -> None:
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "one",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, None)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    assert "nothing computes in int8" in quantize_to_int8(model, [])[1][0]
