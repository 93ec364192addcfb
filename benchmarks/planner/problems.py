"""Five small problems of different kinds, as one job file."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from shoestring import Job


def tokens(count: int, length: int, words: int) -> Iterator[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    while True:
        ids = torch.randint(words, (count, length), generator=draw)
        yield {"input_ids": ids, "labels": ids}


def pictures(count: int, side: int) -> Iterator[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    while True:
        yield {"pixel_values": torch.randn(count, 3, side, side, generator=draw),
               "labels": torch.randint(10, (count,), generator=draw)}


def wide() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1024)) for _ in range(8)),
                         nn.Linear(1024, 10))


def rows(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    while True:
        yield torch.randn(count, 1024, generator=draw), torch.randint(10, (count,), generator=draw)


PROBLEMS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Iterator[Any]]]] = {
    "gpt2": (lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_layer=6, n_embd=256, n_head=4, vocab_size=1000, n_positions=256)), lambda: tokens(8, 128, 1000)),
    "bert": (lambda: transformers.BertForMaskedLM(transformers.BertConfig(
        num_hidden_layers=6, hidden_size=256, num_attention_heads=4, intermediate_size=1024, vocab_size=1000)),
        lambda: tokens(8, 128, 1000)),
    "llama": (lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(
        num_hidden_layers=6, hidden_size=256, num_attention_heads=4, intermediate_size=688, vocab_size=1000)),
        lambda: tokens(8, 128, 1000)),
    "vit": (lambda: transformers.ViTForImageClassification(transformers.ViTConfig(
        num_hidden_layers=6, hidden_size=256, num_attention_heads=4, intermediate_size=1024, image_size=64, patch_size=8,
        num_labels=10)), lambda: pictures(16, 64)),
    "wide": (wide, lambda: rows(512)),
}


def job(problem: str = "gpt2", steps: int = 8) -> Job:
    model, data = PROBLEMS[problem]
    return Job(model=model, data=data, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4), steps=steps)
