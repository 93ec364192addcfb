"""Layers that the model's factory froze cost no gradient and no moments, are the same bits after training, and their plans are exact."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoestring import Job
from shoestring.core.costs.hardware import Hardware
from shoestring.core.costs.ledger import Ledger
from shoestring.core.exactness import Exactness
from shoestring.core.running.run_weights import bring_home
from shoestring.data.feed import Feed
from shoestring.measure.timeline import peak
from shoestring.training.catalogue import CATALOGUE
from shoestring.training.evidence.rehearse import build_run, rehearse, track
from shoestring.training.loop import steps
from shoestring.training.memory.optimizers.ema import EMA
from shoestring.training.planning.planner import Planner
from shoestring.training.technique import TrainingTechnique as Technique
from tests.ledgers import with_traits
from tests.models import job, seeded


class Pictures(nn.Module):
    """A frozen bottom with batch norms, whose statistics move on, as they do in torch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(4)
        )
        self.head = nn.Linear(8 * 36, 60)
        self.blocks[:2].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.flatten(1))


def two_groups(named: Any) -> torch.optim.Optimizer:
    """The layers slower than the rest."""
    inside = [parameter for name, parameter in named if "layers" in name or "blocks" in name]
    rest = [parameter for name, parameter in named if "layers" not in name and "blocks" not in name]
    return torch.optim.AdamW([{"params": inside, "lr": 1e-3}, {"params": rest, "weight_decay": 0.1}], lr=3e-3)


def pictures() -> Job:
    draw = torch.Generator().manual_seed(1)
    batch = torch.randn(6, 8, 6, 6, generator=draw), torch.randint(60, (6,), generator=draw)
    return Job(model=Pictures, data=lambda: [batch] * 16, optimizer=two_groups, steps=3)


JOBS: dict[str, Callable[[], Job]] = {
    "a transformer": lambda: job("frozen bottom", optimizer=two_groups),
    "pictures": pictures,
}


@cache
def ledger(name: str) -> Ledger:
    return with_traits(Planner(JOBS[name](), Hardware(), inexact=True).ledger(), "own process")


def trained(made: Job, techniques: tuple[Technique, ...]) -> dict[str, Tensor]:
    run = build_run(made, techniques, seeded(made))
    for _ in steps(run, islice(Feed(made), 4)):
        pass
    bring_home(run)
    return {name: value.detach().float() for name, value in run.model.state_dict().items()}


@pytest.mark.parametrize("name", JOBS)
def test_what_is_frozen_has_no_gradient_and_no_moments(name: str) -> None:
    made = JOBS[name]()
    sizes = {
        known: parameter.numel() * 4 for known, parameter in made.model().named_parameters() if parameter.requires_grad
    }
    found, whole = ledger(name), sum(parameter.numel() * 4 for parameter in made.model().parameters())
    assert found.all_gradients == sum(sizes.values()) < whole == found.standing.parameters
    assert found.standing.optimizer == 2 * sum(sizes.values()) + 4 * len(
        sizes
    )  # two moments, and a count of steps each


@pytest.mark.parametrize("name", JOBS)
def test_under_every_technique_frozen_layers_stay_as_they_are_and_the_plan_is_exact_to_the_byte(name: str) -> None:
    made = JOBS[name]()
    begun, plain = seeded(made), trained(made, ())
    frozen = {
        known: parameter.detach().clone()
        for known, parameter in begun.named_parameters()
        if not parameter.requires_grad
    }
    assert frozen and any("running_mean" in known for known in plain) is (name == "pictures")
    tried: list[Technique] = [EMA()]
    for kind in CATALOGUE:
        tried += [one for one in kind.choices(ledger(name)) if not one.refusal(ledger(name)) and not one.computes_in][
            :1
        ]
    assert {type(one).__name__ for one in tried} >= {
        "Accumulate",
        "Checkpoint",
        "OffloadOptimizer",
        "OffloadModel",
        "StepInBackward",
        "OffloadActivations",
    }
    for one in tried:
        after, level = trained(made, (one,)), one.exactness(ledger(name))
        assert all(torch.equal(after[known], value) for known, value in frozen.items()), one
        off = max(float((after[known] - value).abs().max()) for known, value in plain.items())
        assert off == 0 if level is Exactness.BITS else off < 1e-4 or level > Exactness.ROUNDING, (one, off)
        predicted, measured = rehearse(made, (one,)), track(made, (one,), seeded(made))
        assert peak(predicted).bytes == peak(measured).bytes and predicted.moved == measured.moved, one
