"""The small transformer of the benchmark. Every worker pauses, as if it had a slower processor of its own, and one of them longer."""

from __future__ import annotations

import time

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional

from shoestring import Job
from shoestring.jobs.gpt import Gpt, batches


class Slowed:
    """Sleeps so long that what a worker computes takes `times` as long, by the processor's time since the last call."""

    def __init__(self, times: float) -> None:
        self.times, self.last = times, 0.0

    def __call__(self) -> None:
        now = time.thread_time()
        if self.last:
            time.sleep((self.times - 1) * (now - self.last))
        self.last = time.thread_time()


def job(
    slow: int = -1,
    times: float = 4.0,
    stretch: float = 2.0,
    width: int = 96,
    depth: int = 3,
    context: int = 64,
    batch: int = 24,
    rate: float = 0.001,
    steps: int = 4000,
) -> Job:
    """What a worker computes takes `stretch` times its processor's time, and on the rank `slow` `times` as long as that."""
    grouped = distributed.is_initialized()
    nap = Slowed(stretch * (times if distributed.get_rank() == slow else 1.0) if grouped else 1.0)

    def forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        nap()
        output: Tensor = model(batch[0])
        return output

    return Job(
        model=lambda: Gpt(width, depth, 4, context),
        data=lambda: batches(batch, context, 0),
        forward=forward,
        loss=lambda output, batch: functional.cross_entropy(output.flatten(0, 1), batch[1].flatten()),
        weight=lambda batch: batch[1].numel(),
        optimizer=lambda weights: torch.optim.AdamW(weights, lr=rate),
        batch=batch,
        steps=steps,
    )
