"""Small jobs and models to distil."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from shoestring import Job
from shoestring.compression.distillation.teachers import LoadedTeacher, Teachers
from shoestring.data.feed import Feed
from shoestring.runs.weights.initial_weights import fresh_model
from shoestring.training.evidence.rehearse import build_run
from shoestring.training.loop import steps

NET = """
import torch
from torch import nn
from shoestring import Job

def batches(size, count=16):
    draw = torch.Generator().manual_seed(0)
    turn = torch.randn(12, 5, generator=torch.Generator().manual_seed(9))
    return [(x, (x @ turn).argmax(1)) for x in torch.randn(count, size, 12, generator=draw)]

def job(width: int = 48, blocks: int = 4, drop: float = 0.1, alpha: float = 0.5, steps: int = 60, classes: int = 5) -> Job:
    block = lambda: nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Dropout(drop))
    return Job(model=lambda: nn.Sequential(nn.Linear(12, width), *(block() for _ in range(blocks)), nn.Linear(width, classes)),
               data=lambda: batches(32), optimizer=lambda p: torch.optim.AdamW(p, lr=3e-3), steps=steps, held_out=lambda: batches(64, 4),
               metrics=lambda output, batch: {"accuracy": (output.argmax(1) == batch[1]).float().mean()}, goal="max accuracy")
"""


def mlp(width: int = 16, classes: int = 5, seed: int = 0, drop: float = 0.0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(12, width), nn.ReLU(), nn.Dropout(drop), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes)
    )


def batches(count: int = 8, size: int = 16) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    turn = torch.randn(12, 5, generator=draw)
    return [(x, (x @ turn).argmax(1)) for x in torch.randn(count, size, 12, generator=draw)]


def small_job(**changes: Any) -> Job:
    usual: dict[str, Any] = {
        "model": mlp_factory,
        "data": batches,
        "optimizer": lambda p: torch.optim.AdamW(p, lr=1e-2),
        "steps": 8,
    }
    return Job(**(usual | changes))


def mlp_factory() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 5))


def taught_by(*models: nn.Module, passes: int = 0) -> Teachers:
    return Teachers(tuple((lambda model=model: LoadedTeacher(model)) for model in models), passes)


def trained(job: Job, count: int) -> tuple[nn.Module, list[float]]:
    """The job's model after so many plain steps, and their losses."""
    model = fresh_model(job)
    run = build_run(job, (), model)
    return model, [float(loss) for loss in steps(run, islice(Feed(job), count))]
