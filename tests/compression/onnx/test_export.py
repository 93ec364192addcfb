"""ONNX files compute what the model does, from packed weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

from shoestring.compression.formats.codebook import CodebookFormat
from shoestring.compression.formats.format import PlainFormat, WeightFormat
from shoestring.compression.formats.grid import GridFormat, matrix_shape
from shoestring.compression.formats.packed_modules import place_formats
from shoestring.compression.onnx.export import ExportedFile, export_onnx
from shoestring.core.errors import Mistake

pytest.importorskip("onnxruntime")

from shoestring.compression.onnx.check import session


def gridded(weight: Tensor, bits: int, group: int) -> WeightFormat:
    rows, columns = matrix_shape(tuple(weight.shape))
    draw = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 2**bits, (rows, columns), generator=draw)
    groups = -(-columns // group)
    scales = torch.rand(rows, groups, generator=draw) * 0.2 / 2**bits + 0.01
    zeros = torch.randint(0, 2**bits, (rows, groups), generator=draw)
    return GridFormat.of(codes, scales, zeros, bits, group, tuple(weight.shape), weight.dtype)


def booked(weight: Tensor, bits: int, group: int) -> WeightFormat:
    rows, columns = matrix_shape(tuple(weight.shape))
    draw = torch.Generator().manual_seed(4)
    scales = torch.rand(rows, -(-columns // group), generator=draw) + 0.1 if group else None
    return CodebookFormat.of(
        torch.randint(0, 2**bits, (rows, columns), generator=draw),
        torch.randn(2**bits, generator=draw) * 0.1,
        scales,
        bits,
        group,
        tuple(weight.shape),
        weight.dtype,
    )


def packed(model: nn.Module, form: Callable[[Tensor], WeightFormat]) -> nn.Module:
    return place_formats(model, {name: form(value) for name, value in model.named_parameters() if value.ndim > 1})


def called(model: nn.Module, batch: Any) -> Any:
    return model(batch)


def written(
    model: nn.Module, batch: Any, folder: Path, forward: Callable[..., Any] = called, **more: Any
) -> tuple[ExportedFile, onnx.ModelProto]:
    found = export_onnx(model, forward, batch, folder / "model.onnx", **more)
    return found, onnx.load(found.path)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 24, bias=False))


def dense_floats(model: onnx.ModelProto, least: int) -> list[str]:
    """Constants in float32 with so many numbers."""
    return [
        one.name
        for one in model.graph.initializer
        if one.data_type == onnx.TensorProto.FLOAT and torch.Size(one.dims).numel() >= least
    ]


@pytest.mark.parametrize(
    ("bits", "group"),
    [(4, 16), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((8, 32), (3, 24), (6, 100), (2, 16)))],
)
def test_a_grid_stays_packed_in_the_file(tmp_path: Path, bits: int, group: int) -> None:
    model = packed(mlp(), lambda weight: gridded(weight, bits, group))
    found, graph = written(model, torch.randn(3, 32), tmp_path)
    assert found.largest_difference <= found.tolerance == 1e-4
    assert dense_floats(graph, 24 * 64) == [] and found.bytes == found.path.stat().st_size
    kinds = {node.op_type for node in graph.graph.node}
    assert ("MatMulNBits" in kinds) == (group in (16, 32)) and ("DequantizeLinear" in kinds) == (group not in (16, 32))
    assert bool(found.notes) == (bits in (2, 3, 6)), "what takes more bytes than in the folder is told"


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "group"), [(4, 16), (8, 0), (5, 13)])
def test_a_codebook_stays_packed_in_the_file(tmp_path: Path, bits: int, group: int) -> None:
    found, graph = written(packed(mlp(), lambda weight: booked(weight, bits, group)), torch.randn(3, 32), tmp_path)
    assert found.largest_difference <= 1e-4 and dense_floats(graph, 24 * 64) == []


class Tied(nn.Module):
    """An embedding that is the last layer too, in a batch with more than tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.out = nn.Embedding(40, 32), nn.LayerNorm(32), nn.Linear(32, 40, bias=False)
        self.out.weight = self.table.weight

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        hidden = self.norm(self.table(batch["ids"])) * batch["factor"]
        return {"logits": self.out(hidden), "states": (hidden, None), "said": "no tensor"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "form",
    [
        lambda weight: gridded(weight, 4, 16),
        lambda weight: gridded(weight, 5, 10),
        lambda weight: booked(weight, 4, 16),
        lambda weight: PlainFormat.of(weight, "float16"),
    ],
)
def test_tied_embeddings_and_nested_batches(tmp_path: Path, form: Callable[[Tensor], WeightFormat]) -> None:
    model = place_formats(
        Tied(),
        {
            "table.weight": form(torch.zeros(40, 32))
            if form(torch.zeros(40, 32)).kind != "plain"
            else form(torch.randn(40, 32))
        },
    )
    found, graph = written(model, {"ids": torch.randint(0, 40, (2, 5)), "factor": 0.5}, tmp_path)
    assert [one.name for one in graph.graph.output] == ["logits", "states_0"]
    assert found.largest_difference <= 1e-4 and dense_floats(graph, 40 * 32) == []
    dims = graph.graph.input[0].type.tensor_type.shape.dim
    assert dims[0].dim_param and dims[1].dim_param, "samples and lengths stay open"


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.Conv2d(8, 8, 3, padding=1, groups=2),
        )
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        return self.last((x + self.second(x)).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(6, 16, num_layers=2, batch_first=True, bidirectional=True), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Any:
        states, (hidden, cell) = self.lstm(x)
        return self.out(states), {"hidden": hidden, "cell": cell}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "batch"), [(Skips(), torch.randn(2, 3, 8, 8)), (Recurrent(), torch.randn(2, 5, 6))], ids=["skips", "lstm"]
)
def test_convolutions_and_recurrent_layers(tmp_path: Path, model: nn.Module, batch: Tensor) -> None:
    found, graph = written(packed(model, lambda weight: gridded(weight, 8, 16)), batch, tmp_path)
    assert found.largest_difference <= 1e-4 and dense_floats(graph, 600) == []


@pytest.mark.slow
def test_one_sample_gives_a_file_for_many(tmp_path: Path) -> None:
    import onnxruntime

    found, _ = written(mlp(), torch.randn(1, 32), tmp_path)
    runner = onnxruntime.InferenceSession(str(found.path), providers=["CPUExecutionProvider"])
    assert runner.run(None, {"input": torch.randn(7, 32).numpy()})[0].shape == (7, 24)


class Deciding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


def test_what_torch_cannot_export_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(Mistake, match=r"can't export .*data-dependent"):
        export_onnx(Deciding(), called, torch.ones(2, 3), tmp_path / "model.onnx")
    with pytest.raises(Mistake, match="no tensor"):
        export_onnx(mlp(), called, ["text"], tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_computes_something_else_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = packed(mlp(), lambda weight: gridded(weight, 4, 16))
    stored = gridded(torch.zeros(64, 32), 4, 16)
    monkeypatch.setattr(
        "shoestring.compression.onnx.trace.formats_of",
        lambda _: {"0.weight": stored, "2.weight": gridded(torch.zeros(24, 64), 3, 16)},
    )
    with pytest.raises(Mistake, match="differs from the model's"):
        export_onnx(model, called, torch.randn(3, 32), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "llama"])
@pytest.mark.parametrize("fast", [False, True])
def test_transformers_from_configs(tmp_path: Path, kind: str, fast: bool) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 64,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 128,
    }
    model = (
        transformers.BertModel(transformers.BertConfig(**sizes))
        if kind == "bert"
        else transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**sizes, num_key_value_heads=1, tie_word_embeddings=True, use_cache=False)
        )
    )
    batch = {"input_ids": torch.randint(0, 64, (2, 5)), "attention_mask": torch.tensor([[1] * 5, [1, 1, 1, 0, 0]])}
    model = model if fast else packed(model, lambda weight: gridded(weight, 4, 16))
    found, graph = written(model, batch, tmp_path, lambda model, batch: model(**batch), fast=fast)
    kinds = [node.op_type for node in graph.graph.node]
    assert kinds.count("MatMulIntegerToFloat" if fast else "MatMulNBits") >= 11
    assert found.largest_difference <= (0.05 if fast else 1e-4)


class FixedLength(nn.Module):
    """A parameter for every position: the length can't be another."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(5, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.places


@pytest.mark.slow
def test_a_length_that_is_fixed_is_told_and_the_samples_stay_open(tmp_path: Path) -> None:
    found, graph = written(FixedLength(), torch.randn(2, 5, 6), tmp_path)
    dims = graph.graph.input[0].type.tensor_type.shape.dim
    assert dims[0].dim_param and dims[1].dim_value == 5 and "dimension 1 of x is fixed at 5" in found.notes[0]


class Tagger(nn.Module):
    """An answer for every step."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.steps, self.out = kind(6, 16, num_layers=2, batch_first=True, bidirectional=True), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.steps(x)[0])
        return found


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_the_length_of_a_recurrent_layer_is_open(kind: type[nn.RNNBase], tmp_path: Path) -> None:
    """The tracer fixes it, because it runs the layer step by step; the graph has one operator for all steps."""
    torch.manual_seed(0)
    model = Tagger(kind).eval()
    found, graph = written(model, torch.randn(2, 5, 6), tmp_path)
    shapes = [[dim.dim_param or dim.dim_value for dim in one.type.tensor_type.shape.dim] for one in both(graph)]
    assert shapes == [["batch", "length", 6], ["batch", "length", 3]] and not found.notes
    longer = torch.randn(3, 11, 6)
    answer = session(found.path).run(None, {"x": longer.numpy()})[0]
    assert torch.allclose(torch.from_numpy(answer), model(longer), atol=1e-5)


def both(graph: Any) -> list[Any]:
    return [*graph.graph.input, *graph.graph.output]


def test_a_bfloat16_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Mistake, match="is bfloat16, which onnxruntime does not compute with"):
        written(nn.Linear(6, 3).bfloat16(), torch.randn(2, 6).bfloat16(), tmp_path)
