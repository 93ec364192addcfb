"""A job whose numbers are the same on every machine: small whole numbers and halves of them, so that no sum is ever rounded."""

import time

import torch
from torch import nn

from shoestring import Job


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))

    def forward(self, x):
        return x * self.weight


def batches(pause):
    while True:
        time.sleep(pause)
        yield torch.randint(-3, 4, (4, 8)).float()


def job(steps: int = 12, pause: float = 0.0) -> Job:
    return Job(
        model=Net,
        data=lambda: batches(pause),
        loss=lambda output, batch: output.sum(1).mean(),
        steps=steps,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.25, momentum=0.5),
    )
