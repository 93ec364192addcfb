"""A job whose batches, weights and values are what groups stumble over."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shoestring import Job


class Net(nn.Module):
    def __init__(self, own: bool) -> None:
        super().__init__()
        self.first, self.odd, self.never = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.last = nn.Linear(16, 4)
        if own:  # a model that does not follow from the seed
            nn.init.constant_(self.last.bias, float(os.getpid()))

    def forward(self, x: Tensor) -> Tensor:
        odd = x[:, :1] > 1.0
        x = self.first(x).relu()
        if odd.any():  # in many steps one worker has such a sample and the other has none
            x = x + self.odd(x) * odd
        scores: Tensor = self.last(x)
        return scores


def batches(sizes: list[int], ignored: bool) -> list[Any]:
    """Batches of these sizes; `ignored`: all but the first half of a batch has no label."""
    draw = torch.Generator().manual_seed(3)
    made = []
    for size in sizes:
        x = torch.randn(size, 8, generator=draw)
        labels = x[:, :4].argmax(1)
        if ignored:
            labels[(size + 1) // 2 :] = -100
        made.append((x, labels))
    return made


def job(sizes: str = "6,6,6,6", ignored: bool = False, own: bool = False, rate: float = 0.05) -> Job:
    counts = [int(size) for size in sizes.split(",")]
    return Job(
        model=lambda: Net(own),
        data=lambda: batches(counts, ignored),
        steps=len(counts),
        loss=lambda output, batch: functional.cross_entropy(output, batch[1]),
        weight=lambda batch: int((batch[1] >= 0).sum()),
        optimizer=lambda weights: torch.optim.SGD(weights, lr=rate, momentum=0.9, weight_decay=0.1),
    )
