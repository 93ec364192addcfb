"""Ten small problems of different kinds, as one job file."""

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
        yield {
            "pixel_values": torch.randn(count, 3, side, side, generator=draw),
            "labels": torch.randint(10, (count,), generator=draw),
        }


def wide() -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1024)) for _ in range(8)), nn.Linear(1024, 10)
    )


def rows(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    while True:
        yield torch.randn(count, 1024, generator=draw), torch.randint(10, (count,), generator=draw)


class Recurrent(nn.Module):
    """An LSTM with tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1000, 384)
        self.memory = nn.LSTM(384, 384, 3, batch_first=True)
        self.head = nn.Linear(384, 1000)
        self.head.weight = self.words.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.head(self.memory(self.words(input_ids))[0])
        return {"loss": nn.functional.cross_entropy(out.flatten(0, 1), labels.flatten())}


def sounds(count: int) -> Iterator[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    while True:
        yield {
            "input_features": torch.randn(count, 40, 400, generator=draw),
            "labels": torch.randint(3, 1000, (count, 64), generator=draw),
        }


PROBLEMS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Iterator[Any]]]] = {
    "gpt2": (
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_layer=6, n_embd=256, n_head=4, vocab_size=1000, n_positions=256)
        ),
        lambda: tokens(8, 128, 1000),
    ),
    "bert": (
        lambda: transformers.BertForMaskedLM(
            transformers.BertConfig(
                num_hidden_layers=6, hidden_size=256, num_attention_heads=4, intermediate_size=1024, vocab_size=1000
            )
        ),
        lambda: tokens(8, 128, 1000),
    ),
    "llama": (
        lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                num_hidden_layers=6, hidden_size=256, num_attention_heads=4, intermediate_size=688, vocab_size=1000
            )
        ),
        lambda: tokens(8, 128, 1000),
    ),
    "vit": (
        lambda: transformers.ViTForImageClassification(
            transformers.ViTConfig(
                num_hidden_layers=6,
                hidden_size=256,
                num_attention_heads=4,
                intermediate_size=1024,
                image_size=64,
                patch_size=8,
                num_labels=10,
            )
        ),
        lambda: pictures(16, 64),
    ),
    "wide": (wide, lambda: rows(512)),
    "t5": (
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                num_layers=4, d_model=256, d_kv=64, d_ff=1024, num_heads=4, vocab_size=1000, decoder_start_token_id=0
            )
        ),
        lambda: tokens(8, 96, 1000),
    ),
    "resnet": (
        lambda: transformers.ResNetForImageClassification(
            transformers.ResNetConfig(embedding_size=32, hidden_sizes=[64, 128, 256], depths=[2, 2, 2], num_labels=10)
        ),
        lambda: pictures(16, 96),
    ),
    "whisper": (
        lambda: transformers.WhisperForConditionalGeneration(
            transformers.WhisperConfig(
                encoder_layers=4,
                decoder_layers=4,
                d_model=256,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
                encoder_ffn_dim=1024,
                decoder_ffn_dim=1024,
                vocab_size=1000,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
                decoder_start_token_id=1,
                num_mel_bins=40,
                max_source_positions=200,
            )
        ),
        lambda: sounds(8),
    ),
    "mixtral": (
        lambda: transformers.MixtralForCausalLM(
            transformers.MixtralConfig(
                num_hidden_layers=4,
                hidden_size=256,
                num_attention_heads=4,
                num_key_value_heads=2,
                intermediate_size=512,
                num_local_experts=4,
                vocab_size=1000,
            )
        ),
        lambda: tokens(8, 96, 1000),
    ),
    "recurrent": (Recurrent, lambda: tokens(16, 64, 1000)),
}


def job(problem: str = "gpt2", steps: int = 8) -> Job:
    model, data = PROBLEMS[problem]
    return Job(model=model, data=data, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4), steps=steps)
