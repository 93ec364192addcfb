"""A job file: shoestring plan examples/my_job.py --width 512 --memory 600MiB"""

import torch
from torch import Tensor, nn

from shoestring import Job


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(6)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def batches(count: int, width: int):
    draw = torch.Generator().manual_seed(0)
    while True:
        x = torch.randn(count, width, generator=draw)
        yield {"x": x, "y": x[:, :10].argmax(1)}


def job(width: int = 256, batch: int = 256, steps: int = 20) -> Job:
    return Job(
        model=lambda: Net(width),
        data=lambda: batches(batch, width),
        forward=lambda model, batch: model(batch["x"]),
        loss=lambda output, batch: nn.functional.cross_entropy(output, batch["y"]),
        weight=lambda batch: len(batch["y"]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch=batch,
        steps=steps,
    )
