"""Students made of a model that is there: the blocks that are kept have their weights, and the rest counts them right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from shoestring import Job
from shoestring.compression.distillation.students import (
    KeptBlocks,
    every_second,
    fewer_layers,
    layers_of,
    narrower,
    parse_layers,
    repeated_blocks,
)
from shoestring.core.errors import Mistake
from shoestring.runs.weights.initial_weights import fill_weights
from shoestring.runs.weights.tensors import write_tensors


def deep(blocks: int = 5) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(3, 8), *(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(blocks)), nn.Linear(8, 2)
    )


def test_every_second_block_is_kept_with_its_weights() -> None:
    teacher = deep()
    student = every_second(teacher)
    assert len(student) == 5 and len(teacher) == 7  # type: ignore[arg-type]
    for mine, theirs in ((0, 0), (1, 1), (2, 3), (3, 5), (4, 6)):
        assert all(map(torch.equal, student[mine].parameters(), teacher[theirs].parameters()))  # type: ignore[index]
    assert student(torch.randn(4, 3)).shape == (4, 2)


def test_weights_of_a_teachers_file_go_to_the_blocks_that_are_kept(tmp_path: Path) -> None:
    teacher = deep()
    file = tmp_path / "big.safetensors"
    write_tensors(file, dict(teacher.state_dict()), {"format": "pt"})
    kept = KeptBlocks(numbers=(0, 4))
    job = Job(model=lambda: fewer_layers(deep(), kept), data=list, weights=layers_of(deep(), kept, str(file)))
    student = fill_weights(job.model(), job)
    assert len(student) == 4  # type: ignore[arg-type]
    for mine, theirs in ((0, 0), (1, 1), (2, 5), (3, 6)):
        assert all(map(torch.equal, student[mine].parameters(), teacher[theirs].parameters()))  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "llama", "gpt2"])
def test_layers_of_transformers_are_kept_and_counted(kind: str) -> None:
    import transformers

    small = {
        "hidden_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "vocab_size": 50,
    }
    if kind == "bert":
        model: nn.Module = transformers.BertForSequenceClassification(transformers.BertConfig(**small))
    elif kind == "llama":
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**small, num_key_value_heads=2, tie_word_embeddings=True)
        )
    else:
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=16, n_layer=4, n_head=2, vocab_size=50))
    student = every_second(model).eval()
    _, names = repeated_blocks(model)
    place, left = repeated_blocks(student)
    assert (len(names), len(left)) == (4, 2)
    assert getattr(student.config, "n_layer" if kind == "gpt2" else "num_hidden_layers") == 2  # type: ignore[arg-type]
    assert [
        getattr(one, "layer_idx", number) for number, one in enumerate(student.get_submodule(place).children())
    ] == [0, 1]
    ids = torch.randint(50, (2, 7))
    assert torch.isfinite(student(ids).logits).all()
    if kind != "bert":  # with a cache, whose places the layers' numbers are
        grown = student.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)  # type: ignore[operator]
        plain = ids
        for _ in range(grown.shape[1] - ids.shape[1]):
            plain = torch.cat([plain, student(plain).logits[:, -1:].argmax(-1)], 1)
        assert torch.equal(grown, plain)
    if kind == "llama":
        assert student.get_input_embeddings().weight is student.get_output_embeddings().weight  # type: ignore[operator]


def test_a_narrower_mlp_keeps_the_neurons_that_matter() -> None:
    teacher = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    with torch.no_grad():
        teacher[2].weight[:, ::2] = 0  # type: ignore[index,operator]
    student = narrower(teacher, 0.5)
    x = torch.randn(5, 3)
    assert student[0].out_features == 4 and torch.allclose(student(x), teacher(x), atol=1e-6)


def test_what_can_not_be_made_smaller_is_refused() -> None:
    with pytest.raises(Mistake, match="repeated blocks"):
        every_second(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    with pytest.raises(Mistake, match="of 5, counted from 0"):
        fewer_layers(deep(), KeptBlocks(numbers=(0, 5)))
    with pytest.raises(Mistake, match="BatchNorm1d"):
        narrower(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), 0.5)
    for written in ("every=1", "all", "1;2"):
        with pytest.raises(Mistake, match="--layers"):
            parse_layers(written)
