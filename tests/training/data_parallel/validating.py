"""A job whose held-out batches have from one sample to many."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from shoestring import Job


def batches(seed: int, sizes: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    chance = torch.Generator().manual_seed(seed)
    for size in sizes:
        x = torch.randn(size, 32, generator=chance)
        yield x, x[:, :4].argmax(1)


def accuracy(output: Tensor, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    return {"accuracy": (output.argmax(1) == batch[1]).float().mean()}


def judged(model: nn.Module) -> dict[str, float]:
    x, y = next(batches(1, [130]))
    with torch.no_grad():
        return {"accuracy": float((model(x).argmax(1) == y).float().mean())}


def job(validates: bool = True, own: bool = False) -> Job:
    how = (
        {"validate": judged, "goal": "max accuracy"}
        if own
        else {
            "held_out": (lambda: batches(1, [1, 130, 2, 7])) if validates else None,
            "metrics": accuracy if validates else None,
        }
    )
    return Job(
        model=lambda: nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(3)), nn.Linear(32, 4)
        ),
        data=lambda: batches(0, [12] * 10),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        steps=8,
        every=3,
        **how,
    )  # type: ignore[arg-type]
