"""A job whose model freezes its first layer in the middle of training, and thaws it again."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoestring import Job


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))
        self.head = nn.Linear(8, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for parameter in self.layers[0].parameters():
            parameter.requires_grad_(not 3 <= self.calls <= 4)
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.head(x)
        return scores


def job() -> Job:
    draw = torch.Generator().manual_seed(1)
    batches = [(torch.randn(6, 8, generator=draw), torch.randint(4, (6,), generator=draw)) for _ in range(6)]
    return Job(
        model=Net,
        data=lambda: batches,
        steps=6,
        optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, weight_decay=0.1),
    )
