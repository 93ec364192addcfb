"""ONNX files as sources: calibrated in segments, written with packed weights, measured in onnxruntime."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoestring
from shoestring import Job
from shoestring.commands.main import run
from shoestring.core.errors import Mistake

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from shoestring.compression.onnx.file_module import OnnxFileModule, read_onnx  # noqa: E402
from shoestring.compression.onnx.graph_module import OnnxGraphModule  # noqa: E402
from shoestring.compression.onnx.onnx_source import onnx_model_source  # noqa: E402


def write(path: Path, rows: int | str = "batch", opset: int = 13) -> Path:
    """A graph with every use of a weight: a lookup, a convolution with unequal padding, MatMul, Gemm both ways, a tied
    and transposed table, and a weight that only Add reads."""
    draw = torch.Generator().manual_seed(0)
    sizes = {
        "table": (40, 32), "kernel": (64, 32, 3), "wide": (64, 128), "turned": (96, 128), "straight": (96, 32), "offset": (4, 32)
    }  # fmt: skip
    weights = {name: torch.randn(size, generator=draw) / size[-1] ** 0.5 for name, size in sizes.items()}
    constants = [numpy_helper.from_array(one.numpy(), name) for name, one in weights.items()]
    constants.append(numpy_helper.from_array(torch.randn(96, generator=draw).numpy(), "bias"))
    make = helper.make_node
    nodes = [
        make("Gather", ["table", "ids"], ["looked"], axis=0),
        make("Add", ["looked", "offset"], ["placed"]),
        make("Transpose", ["placed"], ["channels"], perm=[0, 2, 1]),
        make("Conv", ["channels", "kernel"], ["convolved"], kernel_shape=[3], pads=[2, 0]),
        make("ReduceMean", ["convolved"], ["mean"], axes=[2], keepdims=0),
        make("MatMul", ["mean", "wide"], ["product"]),
        make("Relu", ["product"], ["active"]),
        make("Gemm", ["active", "turned", "bias"], ["second"], transB=1),
        make("Tanh", ["second"], ["bent"]),
        make("Gemm", ["bent", "straight"], ["vector"]),
        make("Transpose", ["table"], ["back"], perm=[1, 0]),
        make("MatMul", ["vector", "back"], ["scores"]),
    ]
    inputs = [helper.make_tensor_value_info("ids", TensorProto.INT64, [rows, 4])]
    outputs = [helper.make_tensor_value_info("scores", TensorProto.FLOAT, [rows, 40])]
    graph = helper.make_graph(nodes, "net", inputs, outputs, initializer=constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    model.metadata_props.add(key="labels", value="a,b")
    onnx.save(model, path)
    return path


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(output, batch[1])


def job() -> Job:
    draw = torch.Generator().manual_seed(1)
    data = [
        (torch.randint(0, 40, (8, 4), generator=draw), torch.randint(0, 40, (8,), generator=draw)) for _ in range(24)
    ]
    return Job(model=nn.Identity, data=lambda: data, loss=loss)


def test_the_graph_in_segments_computes_what_the_file_does(tmp_path: Path) -> None:
    path, ids = write(tmp_path / "net.onnx"), torch.randint(-40, 40, (5, 4))
    whole, parts = OnnxFileModule(path), OnnxGraphModule(read_onnx(path))
    assert torch.allclose(whole(ids), parts(ids), atol=1e-5)
    assert torch.equal(whole(ids=ids, labels=ids).scores, whole(ids)), "by name: others are ignored"
    assert set(parts.names.values()) == {"table", "kernel", "wide", "turned", "straight", "offset"}
    with pytest.raises(Mistake, match=r"has the inputs ids.*model\(ids="):
        whole(other=ids)
    with pytest.raises(Mistake, match=r"ids is torch\.int64"):
        whole(ids.float())
    with pytest.raises(Mistake, match="onnxruntime can't compute the file"):
        whole(ids + 100)


def test_weights_that_a_branch_reads_stay_in_the_file(tmp_path: Path) -> None:
    make, info = helper.make_node, helper.make_tensor_value_info
    branches = [
        helper.make_graph(
            [make(kind, ["hidden"], [f"{kind}_in"]), make("MatMul", [f"{kind}_in", "inner"], [f"{kind}_out"])],
            kind,
            [],
            [info(f"{kind}_out", TensorProto.FLOAT, None)],
        )
        for kind in ("Relu", "Neg")
    ]
    nodes = [
        make("MatMul", ["x", "outer"], ["hidden"]),
        make("ReduceSum", ["hidden"], ["sum"], keepdims=0),
        make("Greater", ["sum", "zero"], ["positive"]),
        make("If", ["positive"], ["y"], then_branch=branches[0], else_branch=branches[1]),
    ]
    weights = {"outer": torch.randn(16, 16), "inner": torch.randn(16, 8), "zero": torch.tensor(0.0)}
    constants = [numpy_helper.from_array(one.numpy(), name) for name, one in weights.items()]
    inputs, outputs = [info("x", TensorProto.FLOAT, ["batch", 16])], [info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "net", inputs, outputs, initializer=constants)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), tmp_path / "if.onnx"
    )
    whole, parts = OnnxFileModule(tmp_path / "if.onnx"), OnnxGraphModule(read_onnx(tmp_path / "if.onnx"))
    assert list(parts.names.values()) == ["outer"]
    for x in (torch.randn(3, 16), torch.randn(3, 16)):
        assert all(torch.allclose(whole(some), parts(some), atol=1e-4) for some in (x, -x))


def test_a_file_with_a_fixed_number_of_samples_takes_any(tmp_path: Path) -> None:
    free, fixed = OnnxFileModule(write(tmp_path / "a.onnx")), OnnxFileModule(write(tmp_path / "b.onnx", rows=4))
    for count in (1, 4, 9):
        ids = torch.randint(0, 40, (count, 4))
        assert torch.allclose(free(ids), fixed(ids), atol=1e-6)


@pytest.mark.parametrize("rows", ["batch", pytest.param(4, marks=pytest.mark.slow)])
def test_an_onnx_file_is_compressed_within_its_size_and_measured_in_onnxruntime(
    tmp_path: Path, rows: int | str
) -> None:
    path = write(tmp_path / "net.onnx", rows)
    small = shoestring.compress(path, tmp_path / "small", job=job(), size="40KB")
    file = tmp_path / "small" / "model.onnx"
    assert not (tmp_path / "small" / "model.safetensors").exists() and small.report["files"] == ["model.onnx"]
    assert small.report["size_bytes"]["measured"] == file.stat().st_size == small.report["onnx"]["bytes"] <= 40_000
    assert abs(small.report["size_bytes"]["predicted"] / file.stat().st_size - 1) < 0.1
    assert {one["bits"] // 1 for one in small.report["layers"]} <= {4, 8, 16, 32}
    ids = torch.randint(0, 40, (32, 4))
    runner = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    found = torch.cat([torch.from_numpy(runner.run(None, {"ids": some.numpy()})[0]) for some in ids.split(4)])
    wanted = OnnxFileModule(path)(ids)
    damage = (
        1
        - torch.exp(
            -nn.functional.kl_div(found.log_softmax(1), wanted.log_softmax(1), log_target=True, reduction="none").sum(1)
        ).mean()
    )
    told = small.report["fidelity"]["mean"]
    assert 0 < damage < 0.1 and abs((1 - told["measured"]) / float(damage) - 1) < 0.5
    assert abs((1 - told["predicted"]) / (1 - told["measured"]) - 1) < 0.25
    written = onnx.load(file)
    assert {one.key: one.value for one in written.metadata_props} == {"labels": "a,b"}, "the rest of the file stays"
    assert any(node.op_type == "MatMulNBits" for node in written.graph.node)
    assert torch.equal(
        small.model(ids), shoestring.compress(path, tmp_path / "small", job=job(), size="40KB").model(ids)
    )


def change_of(at: str, value: object) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        *path, last = at.split(".")
        place = model
        for one in path:
            place = place[int(one)] if one.isdecimal() else getattr(place, one)
        setattr(place, last, value)

    return change


def outside_numbers(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].ClearField("raw_data")
    model.graph.initializer[0].data_location = TensorProto.EXTERNAL
    model.graph.initializer[0].external_data.add(key="location", value="hole.bin")


@pytest.mark.parametrize(
    ("change", "why"),
    {
        "no operator": (change_of("graph.node.0.op_type", "Nope"), "Nope"),
        "a weight of another size": (lambda model: model.graph.initializer[0].dims.append(1 << 40), "can't be read"),
        "half a number": (change_of("graph.initializer.0.raw_data", b"123"), "can't be read"),
        "no dtype": (change_of("graph.input.0.type.tensor_type.elem_type", 77), "can't be read"),
        "no inputs": (lambda model: model.graph.node[0].ClearField("input"), "can't be read"),
        "later operators": (change_of("opset_import.0.version", 9999), "can't be read"),
        "numbers in a hole": (outside_numbers, "hole.bin takes 1,099,511,627,776 bytes, and files up to"),
        "samples without end": (
            change_of("graph.input.0.type.tensor_type.shape.dim.0.dim_value", 1 << 40),
            "fixes 1099511627776 samples",
        ),
    }.values(),
)  # fmt: skip
def test_a_file_that_says_what_can_not_be_is_refused(change: Callable[[Any], object], why: str, tmp_path: Path) -> None:
    model = onnx.load(write(tmp_path / "net.onnx"))
    change(model)
    (tmp_path / "net.onnx").write_bytes(model.SerializeToString())
    with open(tmp_path / "hole.bin", "wb") as hole:
        hole.truncate(1 << 40)
    with pytest.raises(Mistake, match=why):
        onnx_model_source(tmp_path / "net.onnx", job())


def test_what_does_not_apply_to_an_onnx_file_is_refused_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "net.onnx")
    for options, said in (
        ({"use": ["Prune(neurons=0.5)"]}, "Prune needs the PyTorch model"),
        ({"use": ["Sparsify(share=0.5)"]}, "no operators in ONNX"),
        ({"heal": "1m"}, "--heal needs the PyTorch model|heal= needs"),
        ({"to": "onnx-int8"}, "needs the PyTorch model"),
        ({"latency": "1ms"}, "plans do not predict it"),
        ({"model": nn.Identity()}, "has its own"),
    ):
        with pytest.raises(Mistake, match=said):
            shoestring.compress(path, tmp_path / "small", job=job(), **({"size": "40KB"} | options))
    with pytest.raises(Mistake, match="no data to calibrate"):
        shoestring.compress(path, tmp_path / "small", size="40KB")
    (tmp_path / "text.onnx").write_text("no graph")
    for name, said in (("text.onnx", "can't be read as an ONNX file"), ("lost.onnx", "is not a file")):
        with pytest.raises(Mistake, match=said):
            shoestring.compress(tmp_path / name, tmp_path / "small", size="40KB", job=job())
    assert run(["compress", str(path), "--size", "40KB"]) == 2 and "--job FILE" in capsys.readouterr().err


def test_the_command_compresses_an_onnx_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "net.onnx", opset=17)
    (tmp_path / "data.py").write_text(
        "import torch\nfrom shoestring import Job\n\ndef job() -> Job:\n"
        "    draw = torch.Generator().manual_seed(1)\n"
        "    data = [{'ids': torch.randint(0, 40, (8, 4), generator=draw)} for _ in range(40)]\n"
        "    return Job(model=lambda: None, data=lambda: data)\n"
    )
    words = ["compress", str(path), "--job", str(tmp_path / "data.py"), "--use", "Quantize(bits=8)"]
    assert run([*words, "--out", str(tmp_path / "small"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fidelity"]["mean"]["measured"] > 0.999 and told["latency_ms"]["p50"]["predicted"] is None
    assert run([*words, "--out", str(tmp_path / "small")]) == 0
    assert "InferenceSession" in capsys.readouterr().out
