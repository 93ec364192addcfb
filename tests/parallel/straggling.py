"""A job in which one worker can be made slow, and all write down which samples they train on."""
from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, distributed, nn

from shoestring import Job


class Points(torch.utils.data.Dataset[Any]):
    """Which of four numbers is the largest; and the sample's own number."""

    def __len__(self) -> int:
        return 6000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return x, x[:4].argmax(), index


def few(batches: int, size: int) -> Iterator[Any]:
    for number in range(batches):
        rows = [Points()[size * number + place] for place in range(size)]
        yield torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows]), torch.tensor([row[2] for row in rows])


def job(slow: int = -1, nap: float = 0.0, batch: int = 12, batches: int = 0, seen: str = "", rate: float = 0.01, clip: float = 0.0,
        norm: bool = True) -> Job:
    """`slow`: the rank that sleeps in its forward; `batches`: so many, from an iterable; `seen`: where to write samples."""

    def forward(model: nn.Module, batch: Any) -> Tensor:
        rank = distributed.get_rank() if distributed.is_initialized() else 0
        if rank == slow:
            time.sleep(nap)
        if seen:
            file = os.open(seen, os.O_APPEND | os.O_CREAT | os.O_WRONLY)
            os.write(file, f"{rank} {' '.join(map(str, batch[2].tolist()))}\n".encode())
            os.close(file)
        output: Tensor = model(batch[0])
        return output

    return Job(
        model=lambda: nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32) if norm else nn.Identity(), nn.ReLU(), nn.Linear(32, 4)),
        forward=forward,
        data=(lambda: few(batches, batch)) if batches else Points, optimizer=lambda weights: torch.optim.AdamW(weights, lr=rate),
        batch=batch, clip=clip,
    )
