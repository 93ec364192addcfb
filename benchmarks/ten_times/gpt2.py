"""A GPT-2 of transformers with 1.1 billion weights, on one text again and again, its head tied to its embedding, from its configuration."""

from __future__ import annotations

from itertools import repeat

import torch
import transformers

from shoestring import Job
from shoestring.jobs.gpt import batches


def job(
    layers: int = 32, width: int = 1600, batch: int = 1, context: int = 128, steps: int = 4, rate: float = 1e-5
) -> Job:
    config = transformers.GPT2Config(n_layer=layers, n_embd=width, n_head=width // 64)
    return Job(
        model=lambda: transformers.GPT2LMHeadModel(config),
        data=lambda: ({"input_ids": text, "labels": text} for text in repeat(next(batches(batch, context, 0))[0])),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=rate),
        batch=batch,
        steps=steps,
    )
