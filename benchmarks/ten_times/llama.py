"""A Llama of transformers with 1.1 billion weights, on one text again and again, from its configuration."""

from __future__ import annotations

from itertools import repeat

import torch
import transformers

from shoestring import Job
from shoestring.jobs.gpt import batches


def job(
    layers: int = 22, width: int = 2048, batch: int = 1, context: int = 128, steps: int = 4, rate: float = 1e-5
) -> Job:
    config = transformers.LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_attention_heads=width // 64,
        num_key_value_heads=4,
        vocab_size=32000,
    )
    return Job(
        model=lambda: transformers.LlamaForCausalLM(config),
        data=lambda: ({"input_ids": text, "labels": text} for text in repeat(next(batches(batch, context, 0))[0])),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=rate),
        batch=batch,
        steps=steps,
    )
