"""Devices with the loss h (w - x)^2 / 2 for their samples x: one step with learning rate 1 / h leads to the mean of x."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoestring.core.clients.local import Local
from shoestring.core.job import Job
from shoestring.federated.devices.records import Records
from shoestring.federated.playing.seeds import generator_of, seed_of
from shoestring.federated.round import Objective, Sums
from shoestring.federated.tasks.gather import Cohort
from shoestring.federated.tasks.privacy.registry import Registry

CURVATURE = 2.0  # h: the best rate is 0.5
ZERO, FAR = torch.zeros(1), torch.full((1,), 0.5)
LOCAL = Local(epochs=1, batch=0, lr=0.1, held_out=0.25)


class Trained(NamedTuple):
    rows: Tensor


@dataclass(frozen=True)
class Quadratic:
    """An engine. `breaks`: a device that fails; `spoilt`: one whose records give no finite number; `steep`: one on which training with a
    rate of 0.3 or more diverges."""

    breaks: str = ""
    spoilt: str = ""
    steep: str = ""

    def evaluate(self, rows: Tensor, records: Sequence[Records]) -> tuple[Sums, ...]:
        return tuple(self.one(row, device) for row, device in zip(rows.expand(len(records), -1), records, strict=True))

    def one(self, row: Tensor, device: Records) -> Sums:
        if device.name == self.breaks:
            raise RuntimeError("secret-4711")
        count = len(device.held_out)
        if not count:
            return {}
        away = row.double() - device.data[device.held_out]
        scale = float("nan") if device.name == self.spoilt else 1.0
        return {
            "loss": (float((CURVATURE * away**2 / 2).sum()) * scale, float(count)),
            "near": (float((away.abs() < 0.5).sum()) * scale, float(count)),
        }

    def train_weights(
        self, start: Tensor, records: Sequence[Records], objective: Objective, seeds: Sequence[int]
    ) -> Trained:
        assert len(seeds) == len(records)
        rows = start.clone()
        for place, device in enumerate(records):
            for _ in range(objective.local.epochs):
                rows[place] *= float("inf") if device.name == self.steep and objective.local.rate >= 0.3 else 1.0
                rows[place] -= objective.local.rate * CURVATURE * (rows[place] - device.data[device.trained].mean())
        return Trained(rows)


def records_of(name: str) -> Records:
    """5 to 40 samples around a centre of the device's own, which is far from that of others. One in four is held out."""
    generator = generator_of("toy", name)
    count = 5 + seed_of("count", name) % 36
    centre = torch.randn((), generator=generator) * 2 + 3
    data = (centre + 0.3 * torch.randn(count, generator=generator)).double()
    aside = max(count // 4, 1)
    return Records(name, data, torch.arange(aside, count), torch.arange(aside))


def job_of(**changes: Any) -> Job:
    return replace(Job(model=lambda: nn.Linear(1, 1), data=list, local=LOCAL), **changes)


def cohort_of(
    engine: Quadratic | None = None, records: Callable[[str], Records] = records_of, chunk: int = 7, **job: Any
) -> Cohort:
    return Cohort(
        job_of(**job),
        engine or Quadratic(),
        records,
        {"": ZERO, "far": FAR},
        Registry(None),
        seed=3,
        chunk=chunk,
        clock=lambda: 0.0,
    )


def names_of(count: int) -> list[str]:
    return [f"device {number}" for number in range(count)]
