"""The allocator's own count is the witness: at every moment of a step, what the tracker says is alive is what the allocator gave away."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoestring import Job
from shoestring.measure.tracker import Log, Tracker
from shoestring.training.evidence.rehearse import track
from shoestring.training.memory.accumulate import Accumulate
from shoestring.training.memory.offload.offload_activations import OffloadActivations
from shoestring.training.memory.optimizers.fused import FusedOptimizer
from shoestring.training.memory.optimizers.step_in_backward import StepInBackward
from shoestring.training.memory.recompute.checkpoint import Checkpoint
from shoestring.training.technique import TrainingTechnique as Technique
from tests.allocator import Account, account
from tests.awkward import AWKWARD
from tests.models import MODELS, job, seeded

PLANS: tuple[tuple[Technique, ...], ...] = (
    (),
    (Checkpoint(every=1),),
    (Accumulate(2), Checkpoint(groups=-1), FusedOptimizer()),
    (OffloadActivations(), FusedOptimizer()),
    (Checkpoint(every=2), StepInBackward()),
)
PLAIN = (
    "a sparse matrix",
    "sparse gradients",
    "complex weights",
    "packed sequences",
    "tied weights",
    "an autograd function of its own",
    "a result changed in place",
    "a list that grows",
    "batch norm",
    "an LSTM",
    "second derivatives",
    "a graph",
)


def witnessed(made: Any, plan: tuple[Technique, ...] = ()) -> Account:
    def work() -> Log:
        one: Job = made()
        return track(one, plan, seeded(one))

    return account(work)


@pytest.mark.parametrize("name", ["chain", "gpt2", "u-net", "recurrent", "resnet"])
def test_the_allocator_counts_what_the_tracker_counts_under_every_plan(name: str) -> None:
    for plan in PLANS:
        found = witnessed(lambda: job(name), plan)
        assert not found.unseen and len(found.moments) > 10, plan


@pytest.mark.parametrize("name", PLAIN)
def test_the_allocator_counts_what_the_tracker_counts_of_awkward_models(name: str) -> None:
    assert not witnessed(AWKWARD[name].job).unseen


@pytest.mark.slow
@pytest.mark.parametrize("name", [*(name for name in MODELS), *(name for name in AWKWARD if name not in PLAIN)])
def test_the_allocator_counts_what_the_tracker_counts_of_all_models(name: str) -> None:
    assert not witnessed(AWKWARD[name].job if name in AWKWARD else lambda: job(name)).unseen


def called(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch)


def squared(output: Tensor, batch: Tensor) -> Tensor:
    return output.square().mean()


class Strange(nn.Module):
    """Resizes storages with and without operations, writes to a given tensor, and uses nested tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.kept, self.given = (
            nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)),
            torch.empty(0),
            torch.empty(0),
        )

    def forward(self, x: Tensor) -> Tensor:
        self.kept = torch.empty(0).resize_(500, 32).fill_(1.0)
        self.freed = torch.randn(4000)
        self.freed.untyped_storage().resize_(0)
        with torch.no_grad():
            torch.mm(x, x.t(), out=self.given)
        ragged = torch.nested.nested_tensor([x[:3], x[3:]], layout=torch.jagged)
        return self.body(x) * self.kept[0] + (ragged * 2).values().sum()


def test_storages_that_change_their_size_and_tensors_made_of_others_are_counted() -> None:
    found = witnessed(
        lambda: Job(model=Strange, data=lambda: [torch.randn(16, 32) for _ in range(3)], loss=squared, forward=called)
    )
    late = {
        place: off for place, off in found.unseen.items() if "forward" not in place
    }  # without an operation: seen when a phase ends
    assert not late


def test_the_witness_notices_a_tensor_that_nobody_tracked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tracker, "hold_new", lambda tracker, held: None)

    def made() -> Job:
        held = torch.ones(3000)
        return Job(
            model=lambda: nn.Linear(8, 8),
            data=lambda: [torch.randn(4, 8) for _ in range(3)],
            forward=called,
            loss=lambda output, batch: squared(output, held),
        )

    found = witnessed(made)
    assert len(found.unseen) == len(found.moments) and min(found.unseen.values()) >= 3000 * 4
