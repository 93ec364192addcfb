"""A job of six blocks in a row, for pipelines: batches of any sizes, each drawn from its own seed; and what PipeDream makes of it in one
process, where every update is simulated."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from shoestring import Job
from shoestring.core.batch import split

SIZES = (10, 10, 10, 2, 10, 10, 10)  # of batches: pieces are uneven, and one batch is too short to fill three stages


class Doomed(nn.Dropout):
    """Kills its process in its `last` forward, once: then the file is there."""

    def __init__(self, dropout: float, file: str, last: int) -> None:
        super().__init__(dropout)
        self.file, self.last, self.count = file, last, 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += type(x) is Tensor  # where it is computed
        if self.count == self.last and not Path(self.file).exists():
            Path(self.file).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


def model(dropout: float = 0.0, file: str = "", last: int = 0) -> nn.Sequential:
    def end(number: int) -> nn.Module:
        return Doomed(dropout, file, last) if last and number == 4 else nn.Dropout(dropout)

    return nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), end(number)) for number in range(6)), nn.Linear(8, 4)
    )


def batches(sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    drawn = [torch.randn(size, 8, generator=torch.Generator().manual_seed(number)) for number, size in enumerate(sizes)]
    return [(x, x[:, :4].argmax(1)) for x in drawn]


def optimizer(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.05, momentum=0.9)


def job(
    dropout: float = 0.0, sizes: str = ",".join(map(str, SIZES)), file: str = "", last: int = 0, ends: bool = False
) -> Job:
    """With `ends` the data are an iterator."""
    counts = [int(size) for size in sizes.split(",")]
    return Job(
        model=lambda: model(dropout, file, last),
        data=lambda: iter(batches(counts)) if ends else batches(counts),
        steps=len(counts),
        optimizer=optimizer,
    )


def simulated(stages: int, pieces: int, flush: int, vertical: bool, sizes: Sequence[int] = SIZES) -> dict[str, Tensor]:
    """The weights after all batches: piece k meets at stage s the weights after the updates of pieces before k - (S-1-s)."""
    torch.manual_seed(0)
    net = model()
    each = 6 // stages  # blocks; what follows the last one belongs to its stage
    parts = [
        [
            one
            for block in net[stage * each : (stage + 1) * each if stage < stages - 1 else None]
            for one in block.parameters()
        ]
        for stage in range(stages)
    ]
    stepped = optimizer(list(net.parameters()))
    versions = [[[one.detach().clone() for one in part]] for part in parts]  # of each stage, after each update
    drained = number = 0
    for step, batch in enumerate(batches(sizes), 1):
        here = split(batch, min(pieces, len(batch[1])))
        for x, labels in here:
            for stage, part in enumerate(parts):
                put(part, versions[stage][max(drained, number - (stages - 1 - (0 if vertical else stage)))])
            stepped.zero_grad()
            nn.functional.cross_entropy(net(x), labels).backward()
            for stage, part in enumerate(parts):
                put(part, versions[stage][-1])
            stepped.step()
            for stage, part in enumerate(parts):
                versions[stage].append([one.detach().clone() for one in part])
            number += 1
        if step % flush == 0 or len(here) < stages:
            drained = number
    return net.state_dict()


@torch.no_grad()
def put(weights: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for one, value in zip(weights, values, strict=True):
        one.copy_(value)
