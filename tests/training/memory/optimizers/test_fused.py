"""Fused kernels step what a for-loop steps, whenever a weight's first gradient comes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoestring import Job
from shoestring.training.evidence.rehearse import build_run
from shoestring.training.loop import steps
from shoestring.training.memory.optimizers.fused import FusedOptimizer
from tests.models import seeded


class Late(nn.Module):
    """Its second layer takes part from the third step on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(4, 4), nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.second(self.first(x)) if self.calls > 2 else self.first(x)


@pytest.mark.parametrize(
    "knobs",
    [
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
        {"momentum": 0.9, "dampening": 0.3, "maximize": True},
        {"momentum": 0.9, "nesterov": True},
        {},
    ],
)
def test_a_weight_whose_first_gradient_comes_late_is_stepped_as_by_a_for_loop(knobs: dict[str, Any]) -> None:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    made = Job(
        model=Late,
        data=lambda: [x] * 6,
        loss=lambda output, batch: output.square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, **knobs),
    )
    found = []
    for plan in ((), (FusedOptimizer(),)):
        model = seeded(made)
        for _ in steps(build_run(made, plan, model), [x] * 6):
            pass
        found.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    assert torch.allclose(*found, atol=1e-6)
