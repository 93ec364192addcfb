"""A small model, trained by shoestring; plain.py trains the same by hand."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from shoestring import Job

WIDTH, BATCH = 256, 48


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 10)
    )


def batches(pause: float) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        time.sleep(pause)  # as if a step took that long
        x = torch.randn(BATCH, WIDTH)
        yield x, x[:, :10].argmax(1)


def job(steps: int = 1_000_000, pause: float = 0.1) -> Job:
    return Job(
        model=model,
        data=lambda: batches(pause),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch=BATCH,
        steps=steps,
    )
