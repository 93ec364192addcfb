"""What a model takes and gives is found by calling it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoestring.core.errors import Mistake
from shoestring.core.job import default_forward
from shoestring.serving.engines.lengths import LengthRule
from shoestring.serving.engines.signature import find_interface
from shoestring.serving.sample import TensorForm
from tests.serving.engines.models import from_config, reader, sounds, texts, torch_layers

WIDTH = 6


class Scores(nn.Module):
    """Vectors of one size, with a loss if labels are given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        scores = self.layer(x)
        return {"scores": scores} | ({} if labels is None else {"loss": nn.functional.cross_entropy(scores, labels)})


def unpacked(model: nn.Module, x: Tensor, label: Tensor) -> Any:
    return model(x)


def pairs(rows: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, WIDTH), torch.randint(0, 3, (rows,))


def test_inputs_and_outputs_of_what_an_answer_yields() -> None:
    pytest.importorskip("transformers")
    found = find_interface(from_config("Bert"), default_forward, values=texts())
    assert found.signature.inputs == (
        TensorForm("input_ids", "int64", (-1,)),
        TensorForm("attention_mask", "int64", (-1,)),
    )
    assert found.signature.outputs == (
        TensorForm("last_hidden_state", "float32", (-1, 32)),
        TensorForm("pooler_output", "float32", (32,)),
    )
    assert found.signature.container is dict and found.signature.varies


@pytest.mark.parametrize(
    "forward",
    [
        default_forward,  # reads batch[0]
        lambda model, batch: model(batch[0], labels=batch[1]),
        lambda model, batch: unpacked(model, *batch),
    ],
)
def test_labels_of_a_tuple_are_no_inputs(forward: Any) -> None:
    found = find_interface(Scores().eval(), forward, batches=[pairs(), pairs()])
    assert [one.shape for one in found.signature.inputs] == [(WIDTH,)]
    assert [one.name for one in found.signature.outputs] == ["scores"]
    assert not found.signature.varies and found.samples[0].length == 1
    batch = found.inputs.batch(found.samples[:3])
    assert torch.equal(batch[0], torch.stack([next(iter(one.inputs.values())) for one in found.samples[:3]]))
    assert batch[1] is None


def test_labels_of_a_mapping_are_no_inputs() -> None:
    x, labels = pairs()
    found = find_interface(Scores().eval(), default_forward, batches=[{"x": x, "labels": labels}])
    assert [one.name for one in found.signature.inputs] == ["x"]
    assert list(found.inputs.batch(found.samples[:2])) == ["x"]


def test_a_batch_of_equal_lengths_is_of_any_length_if_the_model_takes_shorter_ones() -> None:
    subject = reader(pooled="all")
    found = find_interface(subject.model, subject.forward, batches=[torch.randint(0, 9, (4, 12))])
    assert found.signature.inputs[0].shape == (-1,) and found.signature.container is Tensor
    assert [one.shape for one in found.signature.outputs] == [(-1, 5), (-1, 32)]


def test_a_tuple_of_two_inputs_keeps_both_though_one_changes_nothing() -> None:
    """A mask that hides nothing does not change the outputs, and is an input nevertheless."""
    subject = torch_layers()
    ids = torch.randint(1, 9, (3, 7))
    found = find_interface(subject.model, subject.forward, batches=[(ids, torch.zeros_like(ids, dtype=torch.bool))])
    assert [one.shape for one in found.signature.inputs] == [(-1,), (-1,)]


def test_sizes_behind_convolutions_follow_from_the_length() -> None:
    pytest.importorskip("transformers")
    settings = {"conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2}
    model = from_config("Wav2Vec2", num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, **settings)
    states = find_interface(model, default_forward, values=sounds()).outputs[0]
    assert states.axes == ((0, LengthRule(10, -10)),)
    assert all(LengthRule(10, -10)(n) == ((n - 10) // 5 + 1 - 3) // 2 + 1 for n in range(20, 400))


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"ids": torch.zeros(4)}, "the model takes input_ids, attention_mask, and got ids"),
        (torch.zeros(4), "the model takes input_ids, attention_mask, and got a Tensor"),
        ({"input_ids": torch.ones(4).long(), "attention_mask": "x"}, "attention_mask must be a tensor, and is a str"),
        (
            {"input_ids": torch.ones(2, 4).long(), "attention_mask": torch.ones(4).long()},
            r"input_ids has the shape \[2, 4\]",
        ),
        ({"input_ids": torch.ones(0).long(), "attention_mask": torch.ones(0).long()}, "input_ids is empty"),
        ({"input_ids": torch.rand(4), "attention_mask": torch.ones(4).long()}, "input_ids has the dtype torch.float32"),
    ],
)
def test_a_sample_that_does_not_fit_is_refused(value: Any, told: str) -> None:
    pytest.importorskip("transformers")
    inputs = find_interface(from_config("Bert"), default_forward, values=texts()).inputs
    with pytest.raises(Mistake, match=told):
        inputs.sample(value)


def test_a_batch_of_one_is_a_sample() -> None:
    pytest.importorskip("transformers")
    value = texts()[1]
    inputs = find_interface(from_config("Bert"), default_forward, values=texts()).inputs
    assert inputs.sample(value).length == 9 and inputs.sample(value).inputs["input_ids"].shape == (9,)
    assert inputs.sample({name: one[0] for name, one in value.items()}).shapes == inputs.sample(value).shapes
    assert inputs.sample(tuple(value.values())).shapes == inputs.sample(value).shapes


def test_a_forward_that_reads_nothing_is_refused() -> None:
    with pytest.raises(Mistake, match="the job's forward reads no tensor of its batch"):
        find_interface(Scores().eval(), lambda model, batch: model(torch.ones(2, WIDTH)), batches=[pairs()])
