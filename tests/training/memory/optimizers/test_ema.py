"""EMA: the weights that are trained stay the same bits; their average is what is validated, shown and exported, and survives restarts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from shoestring import Job, Mistake
from shoestring.core.running.run_weights import result, weights
from shoestring.measure.timeline import peak
from shoestring.training.conflicts import clash
from shoestring.training.data_parallel.data_parallel import DataParallel
from shoestring.training.data_parallel.sharding.shard import Shard
from shoestring.training.evidence.rehearse import rehearse, track
from shoestring.training.memory.accumulate import Accumulate
from shoestring.training.memory.offload.offload_optimizer import OffloadOptimizer
from shoestring.training.memory.optimizers.ema import EMA
from shoestring.training.memory.optimizers.fused import FusedOptimizer
from shoestring.training.memory.optimizers.step_in_backward import StepInBackward
from shoestring.training.memory.precision import Precision
from shoestring.training.memory.recompute.checkpoint import Checkpoint
from shoestring.training.technique import TrainingTechnique as Technique
from tests.interrupted import trained
from tests.models import seeded
from tests.training.members import Group
from tests.waiting import HUNG

BATCHES = [
    (torch.randn(8, 6, generator=torch.Generator().manual_seed(number)), torch.arange(8) % 3) for number in range(4)
]


class Tied(nn.Module):
    """A frozen layer, a batch norm, and a weight with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.one, self.other, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.other(torch.tanh(self.one(self.norm(self.frozen(x)))))))


def job(**more: Any) -> Job:
    return Job(
        **{
            "model": Tied,
            "data": lambda: BATCHES,
            "steps": 9,
            "optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        }
        | more
    )


def by_hand(made: Job, decay: float, warmup: bool = False) -> dict[str, Tensor]:
    model = seeded(made)
    optimizer = made.optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for number in range(made.steps):
        x, y = BATCHES[number % 4]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        now = min(decay, (2 + number) / (11 + number)) if warmup else decay
        for name, parameter in model.named_parameters():
            found[name].lerp_(parameter.detach(), 1 - now)
    return model.state_dict() | found | {"other.weight": found["one.weight"]}


@pytest.mark.parametrize("warmup", [False, True])
def test_the_average_is_that_of_a_loop_by_hand_and_the_same_after_restarts(warmup: bool, tmp_path: Path) -> None:
    plain, made = trained(job(), (), tmp_path / "plain"), EMA(0.8, warmup)
    whole, parted = (
        trained(job(), (made,), tmp_path / "whole"),
        trained(job(), (made,), tmp_path / "parted", stops=(1, 4, 5)),
    )
    assert torch.equal(whole.weights, plain.weights) and torch.equal(parted.weights, plain.weights)
    expected = by_hand(job(), 0.8, warmup)
    for one in (whole, parted):
        found = result(one.run)
        assert set(found) == set(expected) and all(torch.equal(found[name], value) for name, value in expected.items())
        assert not torch.equal(found["head.weight"], weights(one.run)["head.weight"])


def test_inside_usable_the_model_has_the_averages_and_outside_its_own(tmp_path: Path) -> None:
    run = trained(job(), (EMA(0.8),), tmp_path).run
    expected, own = by_hand(job(), 0.8), {name: value.clone() for name, value in run.model.state_dict().items()}
    with run.outside.usable():
        assert all(torch.equal(value, expected[name]) for name, value in run.model.state_dict().items())
    assert all(torch.equal(value, own[name]) for name, value in run.model.state_dict().items())
    assert not torch.equal(own["head.weight"], expected["head.weight"])


def test_validation_looks_at_the_average(tmp_path: Path) -> None:
    seen: list[Tensor] = []
    made = job(validate=lambda model: {"loss": float(seen.append(model.head.weight.detach().clone()) or 0)}, every=9)
    trained(made, (EMA(0.8),), tmp_path)
    assert torch.equal(seen[-1], by_hand(job(), 0.8)["head.weight"])


@pytest.mark.parametrize(
    "others",
    [
        (),
        (Accumulate(2),),
        (Checkpoint(every=1),),
        (FusedOptimizer(),),
        (StepInBackward(),),
        (Precision("bf16"),),
        (OffloadOptimizer(),),
    ],
    ids=str,
)
def test_it_costs_what_was_rehearsed_and_one_copy_of_what_is_trained(others: tuple[Technique, ...]) -> None:
    wide = job(
        model=lambda: nn.Sequential(
            nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 5000), nn.Tanh(), nn.Linear(5000, 3)
        )
    )
    made = (*others, EMA())
    predicted, measured = peak(rehearse(wide, made)).bytes, peak(track(wide, made, seeded(wide))).bytes
    without = peak(rehearse(wide, others)).bytes
    trained_bytes = 4 * (6 * 5000 + 5000 + 5000 * 3 + 3)
    assert predicted - without == trained_bytes and abs(predicted - measured) <= 0.001 * measured * (
        others == (Precision("bf16"),)
    )


def test_what_has_no_whole_weights_at_every_step_is_refused_with_the_reason() -> None:
    from shoestring.training.data_parallel.gradient_compression.compress_gradients import CompressGradients
    from shoestring.training.data_parallel.local_steps import LocalSteps
    from shoestring.training.data_parallel.parameter_server.asynchronous import Asynchronous
    from shoestring.training.data_parallel.parameter_server.drop_stragglers import DropStragglers
    from shoestring.training.memory.offload.offload_model import OffloadModel

    for other in (
        OffloadModel(),
        Shard(3),
        LocalSteps(),
        CompressGradients("topk", share=0.1),
        Asynchronous("hogwild"),
        DropStragglers(),
    ):
        assert clash(EMA(0.9), other), other
    for other in (Shard(1), Shard(2), DataParallel(), CompressGradients("int8"), OffloadOptimizer()):
        assert not clash(EMA(0.9), other), other
    with pytest.raises(Mistake, match="mostly rounding"):
        rehearse(job(), (Precision("bf16", "bf16"), EMA()))
    with pytest.raises(Mistake, match="decay=1"):
        EMA(1.0)


FILE = """
import torch
from torch import nn
from shoestring import Job

def job() -> Job:
    batches = [(torch.randn(8, 6, generator=torch.Generator().manual_seed(n)), torch.arange(8) % 3) for n in range(4)]
    return Job(model=lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)), data=lambda: batches, steps=8, clip=1.0,
               optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
               schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5))
"""


@pytest.mark.parametrize("united", [DataParallel(), Shard(2)], ids=str)
def test_a_group_has_the_average_of_one_process_and_exports_it(united: Technique, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(FILE)
    found = {}
    for name, world, plan in (("one", 1, [EMA(0.5)]), ("two", 2, [united, EMA(0.5)])):
        folder = tmp_path / name
        folder.mkdir()
        Group(tmp_path / f"at {name}", world, tmp_path / "job.py", plan, 8, str(folder), {"steps": 3}).results()
        checkpoint = newest(folder)
        found[name] = {
            kind: {
                key: torch.cat([piece.reshape(-1) for piece in one.pieces()])
                for key, one in checkpoint.all_weights(trained=kind == "trained").items()
            }
            for kind in ("average", "trained")
        }
    for kind in ("average", "trained"):
        assert all(
            torch.allclose(value, found["two"][kind][key], atol=1e-6) for key, value in found["one"][kind].items()
        )
    assert not torch.allclose(found["one"]["average"]["0.weight"], found["one"]["trained"]["0.weight"], atol=1e-4)


def newest(folder: Path) -> Any:
    from shoestring.runs.checkpoints.checkpoints import newest_good

    found, bad = newest_good(folder / "checkpoints")
    assert found is not None and not bad
    return found


@pytest.mark.usefixtures("warm_workers")
def test_export_gives_the_average_and_with_trained_the_weights(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(FILE)

    def shoestring(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "shoestring", *words], cwd=tmp_path, capture_output=True, text=True, timeout=HUNG
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    shoestring("train", "job.py", "--use", "EMA(decay=0.5)", "--run", "a")
    for name, more in (("average", []), ("trained", ["--trained"])):
        shoestring("export", "a", "--to", "safetensors", "--out", f"{name}.safetensors", *more)
    average, own = load_file(tmp_path / "average.safetensors"), load_file(tmp_path / "trained.safetensors")
    assert set(average) == set(own) and not any(torch.equal(average[name], own[name]) for name in own)
    steps = [
        event
        for event in map(json.loads, (tmp_path / "a" / "events.jsonl").read_text().splitlines())
        if event["event"] == "step"
    ]
    assert [event["rate"] for event in steps] == [0.1, 0.1, 0.05, 0.05, 0.025, 0.025, 0.0125, 0.0125]
    assert all(event["norm"] > 0 for event in steps)
