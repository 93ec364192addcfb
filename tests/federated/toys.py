"""A small federated job for tests: well separated classes, devices of unequal size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shoestring.core.clients.local import Local
from shoestring.core.job import Job
from shoestring.federated.options import FederateOptions
from shoestring.federated.planning.prepare import Prepared, prepare_federation
from shoestring.federated.simulation.cohort import MethodChoice

WIDTH, CLASSES = 6, 3
ONE_BY_ONE = MethodChoice("sequential", 1, "one after the other")


def records(number: int, count: int | None = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(number)
    targets = torch.randint(CLASSES, (count or 4 + 3 * (number % 5),), generator=generator)
    inputs = torch.randn(len(targets), WIDTH, generator=generator) + 2 * nn.functional.one_hot(targets, WIDTH)
    return list(zip(inputs, targets, strict=True))


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def toy_job(devices: int = 12, **changes: Any) -> Job:
    job = Job(
        model=model,
        data=lambda: records(0, 50),
        clients=lambda: {f"d{number}": records(number) for number in range(devices)},
        local=Local(epochs=1, batch=4, lr=0.1, held_out=0.25),
        seed=3,
        metrics=lambda output, batch: {"accuracy": (output.argmax(1) == batch[1]).float().mean()},
    )
    return replace(job, **changes)


def toy(
    job: Job | None = None,
    how: MethodChoice | None = ONE_BY_ONE,
    per_round: int = 6,
    rounds: int = 3,
    processes: int = 1,
    **asked: Any,
) -> Prepared:
    return prepare_federation(
        job or toy_job(), FederateOptions(per_round=per_round, rounds=rounds, processes=processes, **asked), how=how
    )
