"""A transformer with held-out batches, for stages and tensor ways together."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoestring import Job
from shoestring.jobs.gpt import Gpt

HELD_OUT = 3


def batch(seed: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(256, (4, 17), generator=torch.Generator().manual_seed(seed))
    return text[:, :-1], text[:, 1:]


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten())


@torch.no_grad()
def judged(model: nn.Module) -> dict[str, float]:
    return {"loss of the first": float(loss(model(batch(100)[0]), batch(100)))}


def job(own: bool = False) -> Job:
    how = (
        {"validate": judged, "goal": "min loss of the first"}
        if own
        else {"held_out": lambda: [batch(100 + n) for n in range(HELD_OUT)]}
    )
    return Job(
        model=lambda: Gpt(32, 2, 2, 16),
        data=lambda: [batch(n) for n in range(4)],
        loss=loss,
        weight=lambda one: one[1].numel(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        steps=4,
        every=2,
        **how,
    )  # type: ignore[arg-type]
