"""An ONNX file takes what the forward reads, by its names, and gives answers; no labels, no loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from shoestring.compression.onnx.export import export_onnx
from shoestring.compression.onnx.interface import interface_of, outputs_of
from shoestring.core.errors import Mistake
from shoestring.core.job import default_forward

onnxruntime = pytest.importorskip("onnxruntime")
SIZES = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


class Classifier(nn.Module):
    """Computes its loss itself, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, features: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.layer(features)
        return {"logits": logits} | ({} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)})


class Net(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm, self.head = nn.Embedding(40, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.head(self.lstm(self.table(tokens))[0][:, -1])
        return found


def sides(path: Path) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """Inputs and outputs by name, with their sizes."""
    graph = onnx.load(path).graph
    inputs, outputs = (
        {one.name: [size.dim_param or size.dim_value for size in one.type.tensor_type.shape.dim] for one in some}
        for some in (graph.input, graph.output)
    )
    return inputs, outputs


def checked(
    model: nn.Module, batch: Any, folder: Path, feed: dict[str, Tensor], forward: Callable[..., Any] = default_forward
) -> Any:
    """Export, and run in plain onnxruntime with nothing but this."""
    export_onnx(model, forward, batch, folder / "model.onnx")
    runner = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    found = runner.run(None, {name: value.numpy() for name, value in feed.items()})
    with torch.no_grad():
        wanted = list(outputs_of(model(**feed)).values())
    for one, other in zip(wanted, found, strict=True):
        assert np.allclose(one.numpy(), other, atol=1e-4)
    return sides(folder / "model.onnx")


def test_a_pair_of_inputs_and_labels_gives_one_input_by_the_name_that_forward_has(tmp_path: Path) -> None:
    batch = torch.randn(4, 6), torch.randint(0, 3, (4,))
    assert checked(Net(nn.Linear(6, 3)), batch, tmp_path, {"x": torch.randn(7, 6)}) == (
        {"x": ["batch", 6]},
        {"output": ["batch", 3]},
    )


def test_a_dict_with_labels_gives_no_labels_and_no_loss(tmp_path: Path) -> None:
    batch = {"features": torch.randn(4, 6), "labels": torch.randint(0, 3, (4,))}
    found = checked(Classifier(), batch, tmp_path, {"features": torch.randn(5, 6)})
    assert found == ({"features": ["batch", 6]}, {"logits": ["batch", 3]})


def test_labels_that_the_forward_insists_on_are_left_out_of_the_file_too(tmp_path: Path) -> None:
    def forward(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = model(batch["values"] * 2, batch["target"])
        return found

    batch = {"values": torch.randn(4, 6), "target": torch.randint(0, 3, (4,))}
    export_onnx(Classifier(), forward, batch, tmp_path / "model.onnx")
    assert sides(tmp_path / "model.onnx") == ({"values": ["batch", 6]}, {"logits": ["batch", 3]})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "llama", "gpt2"])
def test_transformers_take_what_they_are_documented_to_take(kind: str, tmp_path: Path) -> None:
    """The labels of a language model are its inputs, often the very same tensor: the file must not take the one for the other."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = {
        "bert": lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES)),
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=1)),
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=40, n_embd=32, n_layer=1, n_head=2, n_positions=32)
        ),
    }[kind]().eval()
    ids = torch.randint(0, 40, (3, 6))
    mask = torch.ones_like(ids)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 1, 1]) if kind == "bert" else ids}
    feed = {"input_ids": torch.randint(0, 40, (2, 5)), "attention_mask": torch.tensor([[1] * 5, [1, 1, 1, 1, 0]])}
    inputs, outputs = checked(
        model,
        batch,
        tmp_path,
        feed,
        lambda model, batch: (
            {"logits": model(**batch).logits} | ({"loss": model(**batch).loss} if "labels" in batch else {})
        ),
    )
    assert inputs == {"input_ids": ["batch", "length"], "attention_mask": ["batch", "length"]}
    assert outputs == {"logits": ["batch", 2] if kind == "bert" else ["batch", "length", 40]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "batch", "feed", "inputs"),
    [
        (
            Net(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)).eval(),
            (torch.randn(4, 3, 6, 6), torch.zeros(4)),
            {"x": torch.randn(2, 3, 6, 6)},
            {"x": ["batch", 3, 6, 6]},
        ),
        (
            Recurrent(),
            {"tokens": torch.randint(0, 40, (3, 6))},
            {"tokens": torch.randint(0, 40, (2, 9))},
            {"tokens": ["batch", "length"]},
        ),
    ],
    ids=["cnn", "lstm"],
)
def test_images_and_sequences(
    model: nn.Module, batch: Any, feed: dict[str, Tensor], inputs: Any, tmp_path: Path
) -> None:
    assert checked(model, batch, tmp_path, feed) == (inputs, {"output": ["batch", 3]})


class Audio(nn.Module):
    """Samples of sound, and an answer for each piece."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces = nn.Conv1d(1, 4, 5, stride=2)

    def forward(self, sound: Tensor) -> Tensor:
        found: Tensor = self.pieces(sound[:, None])
        return found


class Pairs(nn.Module):
    """Words in pairs: a length is an even number."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(40, 8), nn.Linear(16, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.shape[1] % 2:
            raise ValueError("words come in pairs")
        found: Tensor = self.head(self.table(tokens).reshape(tokens.shape[0], -1, 16)).sum(1)
        return found


def test_the_length_of_sound_and_of_channels_is_open(tmp_path: Path) -> None:
    inputs, _ = checked(Audio(), torch.randn(3, 40), tmp_path, {"sound": torch.randn(2, 61)})
    assert inputs == {"sound": ["batch", "length"]}
    inputs, _ = checked(
        Net(nn.Conv1d(6, 4, 3, padding=1)), torch.randn(3, 6, 12), tmp_path, {"x": torch.randn(1, 6, 31)}
    )
    assert inputs == {"x": ["batch", 6, "length"]}


def test_what_the_model_refuses_at_other_lengths_is_written_with_the_length_that_it_takes(tmp_path: Path) -> None:
    made = export_onnx(Pairs(), default_forward, torch.randint(0, 40, (3, 6)), tmp_path / "model.onnx")
    assert sides(tmp_path / "model.onnx")[0] == {"tokens": ["batch", 6]}
    assert made.notes == ("dimension 1 of tokens is fixed at 6: the model computes with that number",)


def test_names_that_are_not_the_models_own_are_the_batchs() -> None:
    x, y = torch.randn(2, 6), torch.randn(2, 6)
    assert interface_of(Net(nn.Linear(6, 3)), lambda model, batch: model(batch["a"] / 2), {"a": x, "b": y}).names == (
        "a",
        "b",
    )
    twice = interface_of(Net(nn.Linear(6, 3)), lambda model, batch: model(batch[0]) - model(batch[1]), (x, y))
    assert twice.names == ("input_0", "input_1"), "one model for two inputs: the name that its forward has is of both"
    assert interface_of(Net(nn.Linear(6, 3)), default_forward, (x, x)).names == ("x", "input_1"), (
        "a tensor that is there twice"
    )


def test_a_forward_that_gives_only_a_loss_is_refused() -> None:
    assert list(outputs_of((torch.tensor(1.0), torch.zeros(2, 3)))) == ["output_1"]
    with pytest.raises(Mistake, match="nothing but a loss"):
        outputs_of({"loss": torch.tensor(1.0)})


def test_a_small_file_has_no_stack_traces_and_no_texts(tmp_path: Path) -> None:
    made = export_onnx(Net(nn.Linear(6, 3)), default_forward, torch.randn(4, 6), tmp_path / "model.onnx")
    assert made.bytes < 21 * 4 + 400
