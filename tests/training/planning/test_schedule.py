"""A rate that changes is seen under every technique, in every group of weights, before and after a restart."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoestring import Job
from shoestring.core.costs.hardware import Hardware
from shoestring.core.costs.ledger import Ledger
from shoestring.core.exactness import Exactness
from shoestring.runs.weights.tensors import TensorFile
from shoestring.training.catalogue import CATALOGUE
from shoestring.training.data_parallel.data_parallel import DataParallel
from shoestring.training.data_parallel.gradient_compression.compress_gradients import CompressGradients
from shoestring.training.data_parallel.local_steps import LocalSteps
from shoestring.training.data_parallel.parameter_server.asynchronous import Asynchronous
from shoestring.training.data_parallel.parameter_server.drop_stragglers import DropStragglers
from shoestring.training.data_parallel.sharding.shard import Shard
from shoestring.training.memory.offload.offload_optimizer import OffloadOptimizer
from shoestring.training.memory.optimizers.ema import EMA
from shoestring.training.planning.planner import Planner
from shoestring.training.technique import TrainingTechnique as Technique
from tests.interrupted import trained
from tests.ledgers import with_traits
from tests.models import job
from tests.training.members import Group

TOLERANCE = 1e-4


def two_groups(named: Any) -> torch.optim.Optimizer:
    """The head learns faster than the rest, by names; torch keeps the names in the groups."""
    head = [(name, parameter) for name, parameter in named if "head" in name]
    rest = [(name, parameter) for name, parameter in named if "head" not in name]
    return torch.optim.SGD([{"params": rest}, {"params": head, "lr": 0.2}], lr=0.1, momentum=0.9)


def falling(optimizer: torch.optim.Optimizer) -> Any:
    """Both the rate and the momentum change, much."""
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.3, 0.5], 8, div_factor=10)


def made(**more: Any) -> Job:
    return job("chain", **{"optimizer": two_groups, "schedule": falling, "steps": 8} | more)


@cache
def ledger() -> Ledger:
    found = Planner(made(), Hardware(dtypes={"bf16": "", "fp16": ""}), inexact=True).ledger()
    return with_traits(found, "own process")


def settings() -> list[Technique]:
    """Of every technique of the catalogue, the settings worth trying on one worker."""
    found = [one for kind in CATALOGUE for one in kind.choices(ledger()) if not one.refusal(ledger())]
    kinds = [type(one).__name__ for one in found]
    return [
        *(one for number, one in enumerate(found) if kinds.index(kinds[number]) == number or "8bit" in str(one)),
        EMA(0.9),
        OffloadOptimizer("host"),
    ]


def test_under_every_technique_the_rate_is_that_of_the_schedule_before_and_after_a_restart(tmp_path: Path) -> None:
    plain = trained(made(), (), tmp_path / "plain")
    constant = trained(made(schedule=None), (), tmp_path / "constant")
    apart = float((plain.weights - constant.weights).abs().max())
    assert apart > 100 * TOLERANCE, "a schedule that is not seen must be found"
    tried = settings()
    assert {type(one).__name__ for one in tried} >= {
        "Accumulate",
        "Checkpoint",
        "EMA",
        "FusedOptimizer",
        "OffloadOptimizer",
        "Precision",
        "OffloadActivations",
        "StepInBackward",
        "OffloadModel",
    }
    for number, one in enumerate(tried):
        whole = trained(made(), (one,), tmp_path / f"whole {number}")
        parted = trained(made(), (one,), tmp_path / f"parted {number}", stops=(2, 5))
        assert parted.rates == whole.rates == plain.rates, one
        assert torch.equal(parted.weights, whole.weights), one
        off, level = float((whole.weights - plain.weights).abs().max()), one.exactness(ledger())
        assert off <= {Exactness.BITS: 0.0, Exactness.ROUNDING: TOLERANCE}.get(level, apart / 3), (one, off, apart)


FILE = """
import torch
from torch import nn
from shoestring import Job

def groups(named):
    return torch.optim.SGD([{"params": [p for n, p in named if n.startswith("0")]},
                            {"params": [p for n, p in named if not n.startswith("0")], "lr": 0.2}], lr=0.1, momentum=0.9)

SCHEDULES = {"falling": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.6), "constant": None,
             "once": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: float(step < 1))}

def job(kind: str = "falling") -> Job:
    batches = [(torch.randn(12, 6, generator=torch.Generator().manual_seed(n)), torch.arange(12) % 3) for n in range(4)]
    return Job(model=lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)), data=lambda: batches, steps=8, clip=0.5,
               optimizer=groups, schedule=SCHEDULES[kind])
"""
RATES = [0.1 * 0.6**step for step in range(8)]


def of_group(
    place: Path, name: str, world: int, plan: list[Technique], stops: tuple[int, ...] = (), **flags: str
) -> torch.Tensor:
    """The weights that a group trained, in processes of its own; it ends after each of `stops` and another goes on."""
    folder = place / name
    folder.mkdir()
    for steps in (*stops, 8):
        Group(
            place / f"at {name}",
            world,
            place / "job.py",
            plan,
            steps,
            str(folder),
            {"steps": 100},
            flags,
            str(place / f"{name}.bin"),
        ).results()
    return torch.cat([value.reshape(-1) for _, value in sorted(TensorFile(place / f"{name}.bin").items())])


def told(folder: Path) -> list[dict[str, Any]]:
    return [
        event
        for event in map(json.loads, (folder / "events.jsonl").read_text().splitlines())
        if event["event"] == "step"
    ]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "job.py").write_text(FILE)
    return tmp_path


@pytest.mark.parametrize("technique", [DataParallel(), Shard(1), Shard(3), CompressGradients("fp16")], ids=str)
def test_a_group_goes_by_the_schedule_before_and_after_a_restart_and_tells_rate_and_norm(
    technique: Technique, place: Path
) -> None:
    plain = of_group(place, "plain", 1, [])
    whole, parted = of_group(place, "whole", 2, [technique]), of_group(place, "parted", 2, [technique], stops=(3,))
    assert torch.equal(whole, parted)
    assert float((whole - plain).abs().max()) <= (1e-5 if technique.exact else 1e-2)
    for name in ("plain", "whole", "parted"):
        assert [event["rate"] for event in told(place / name)] == pytest.approx(RATES)
    norms = [[event["norm"] for event in told(place / name)] for name in ("plain", "whole")]
    assert norms[1] == pytest.approx(norms[0], rel=1e-2)


@pytest.mark.parametrize(
    "technique", [Asynchronous("server"), Asynchronous("hogwild"), DropStragglers(), LocalSteps(4)], ids=str
)
def test_those_who_do_not_wait_for_each_other_go_by_the_schedule_too(technique: Technique, place: Path) -> None:
    """Two runs differ. But a rate that is 0 after the first step leads no further than that step, whoever moves the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    begun = torch.cat([value.reshape(-1) for _, value in sorted(model.state_dict().items())])
    near, far = (
        float((of_group(place, kind, 3, [technique], kind=kind) - begun).norm()) for kind in ("once", "constant")
    )
    assert 0 < near < far / 3
    assert [event["rate"] for event in told(place / "once")] == [0.1] + [0.0] * 7
    assert "rate" not in told(place / "constant")[0]
