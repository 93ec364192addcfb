"""Small models whose layers can be split, as jobs, and what one process makes of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shoestring import Job
from shoestring.core.running.run import Run
from shoestring.core.workers.mesh import Mesh
from shoestring.jobs.gpt import Gpt
from shoestring.training.evidence.rehearse import build_run
from shoestring.training.technique import TrainingTechnique as Technique
from shoestring.training.tensor.layer_kinds import SplitLayers
from shoestring.training.tensor.split_layers import TensorParts
from shoestring.training.tensor.splits import SplitTensor, whole_of
from tests.models import hugging

WORDS = 101  # which no number of workers here divides
LLAMA = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": WORDS,
}
GPT2 = {
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 4,
    "vocab_size": WORDS,
    "n_positions": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
STILL = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def frozen_bottom() -> nn.Module:
    """A Llama whose embedding and first block are not trained."""
    model = hugging("LlamaForCausalLM", "LlamaConfig", **LLAMA)()
    for part in (model.get_submodule("model.embed_tokens"), model.get_submodule("model.layers.0")):
        part.requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: Gpt(64, 2, 4, 24),
    "gpt2": hugging("GPT2LMHeadModel", "GPT2Config", **GPT2, **STILL),
    "gpt2 with dropout": hugging("GPT2LMHeadModel", "GPT2Config", **GPT2),
    "llama": hugging("LlamaForCausalLM", "LlamaConfig", **LLAMA),
    "llama tied": hugging(
        "LlamaForCausalLM", "LlamaConfig", **LLAMA, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "frozen bottom": frozen_bottom,
    "mistral": hugging("MistralForCausalLM", "MistralConfig", **LLAMA),
    "qwen2": hugging("Qwen2ForCausalLM", "Qwen2Config", **LLAMA),
    "qwen3": hugging("Qwen3ForCausalLM", "Qwen3Config", **LLAMA, head_dim=16),
}


class Pair(nn.Module):
    """Two layers with dropout inside and after them, that say themselves how they are split; it keeps what dropout left."""

    tensor_parallel = SplitLayers(columns={"up": 1}, rows=("down",))

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(0.5)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        inside = self.drop(self.up(x))
        after = self.drop(self.down(inside))
        self.seen[:] = [inside != 0, after != 0]
        return x + after


def pairs() -> nn.Module:
    return nn.Sequential(Pair(), Pair(), nn.Linear(16, 4))


def ids() -> Tensor:
    return torch.randint(3, WORDS, (4, 24), generator=torch.Generator().manual_seed(1))


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def split_job(name: str, **changes: Any) -> Job:
    settings: dict[str, Any] = {"optimizer": adam, "steps": 3, "batch": 4}
    if name == "pairs":
        batch = torch.randn(4, 16, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 3])
        return Job(
            model=pairs,
            data=lambda: iter([batch] * 3),
            loss=lambda output, batch: functional.cross_entropy(output, batch[1]),
            **settings | changes,
        )
    if name == "gpt":
        settings |= {
            "loss": lambda output, batch: functional.cross_entropy(output.flatten(0, 1), batch[1].flatten()),
            "data": lambda: iter([(ids(), ids().roll(-1, 1))] * 3),
        }
    else:
        settings |= {"data": lambda: iter([{"input_ids": ids(), "labels": ids()}] * 3)}
    return Job(model=MODELS[name], **settings | changes)


def made(job: Job) -> nn.Module:
    torch.manual_seed(0)
    return job.model()


def run_of(job: Job, techniques: tuple[Technique, ...], model: nn.Module, mesh: Mesh | None = None) -> Run:
    return build_run(job if mesh is None else replace(job, mesh=mesh), techniques, copy.deepcopy(model))


def whole_gradients(run: Run) -> dict[str, Tensor]:
    """All gradients by name, those of split weights put together."""
    parts = run.state.get("tensor parts")
    found = {}
    for name, weight in run.model.named_parameters():
        assert (weight.grad is None) != weight.requires_grad, name
        if weight.grad is None:
            continue
        found[name] = weight.grad
        if isinstance(parts, TensorParts) and weight in parts.splits:
            found[name] = whole_of(
                SplitTensor(weight, parts.splits[weight], parts.shapes[weight], parts.link, weight.grad)
            )
    return found


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """How far tensors are apart at most, relative to the size of each."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).norm() / (expected[name].norm() + 1e-12)) for name in expected)
