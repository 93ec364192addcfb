"""Whether a batch in pieces is the same as at once is tried, and what is not the same is never chosen unasked."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from shoestring import Job
from shoestring.core.costs.hardware import Hardware
from shoestring.core.exactness import Exactness
from shoestring.processes.launch import run_worker
from shoestring.training.data_parallel.data_parallel import DataParallel
from shoestring.training.evidence.tasks import AnchorTask
from shoestring.training.evidence.trials.pieces import try_in_pieces
from shoestring.training.memory.accumulate import Accumulate
from shoestring.training.planning.planner import Planner
from tests.models import job as listed

WIDE = 16


class ActNorm(nn.Module):
    """Sets its weights by the first batch that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.ready = nn.Parameter(torch.ones(WIDE)), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.scale.data.copy_(1 / x.std(0))
            self.ready = True
        return x * self.scale


class Average16(nn.Module):
    """Keeps a moving average of its inputs, by way of `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDE))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.data.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x - self.mean.clone()


class Counting(nn.Module):
    """Does something else at every call."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x / self.calls


class Noisy(nn.Module):
    """Draws in all the ways that torch has."""

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(x, 0.3) + 0.1 * torch.randn_like(x) * torch.rand(x.shape)
        return (
            x * torch.bernoulli(torch.full_like(x, 0.9)) + torch.randint(3, (1,)) + torch.empty_like(x).uniform_(-1, 1)
        )


class Mixup(nn.Module):
    """Mixes samples in an order that is drawn."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.7 * x + 0.3 * x[torch.randperm(len(x))]


class Tossing(nn.Module):
    """Draws from Python."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tensor([random.random() for _ in range(len(x))])[:, None]


class Rows(nn.Module):
    """Sets the rows of a weight that its samples are looked up in, each to the same length."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(64, WIDE, max_norm=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rows(torch.floor(x.detach().abs().sum(1)).long())


class Seen(nn.Module):
    """Counts how often it has seen each sign."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDE))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += (x.detach() > 0).sum(0)
        return x


class Clamped(nn.Module):
    """Clips the gradient of a weight, where it is far larger than in the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDE))
        self.scale.register_hook(lambda slope: slope.clamp(-10.0, 10.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Masked(Clamped):
    """Freezes some numbers of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDE))
        self.scale.register_hook(lambda slope: slope * (torch.arange(WIDE) % 2))


class Steered(nn.Module):
    """Takes another way if the mean of its batch is negative; it is positive in both halves of the job's batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x if float(x.detach().mean()) > -0.1 else 2 * x


class Watchful(nn.Module):
    """Looks at numbers, and computes the same whatever they are."""

    def forward(self, x: Tensor) -> Tensor:
        assert bool(x.isfinite().all()) and float(x.detach().mean()) < 1e9
        return x


def job(middle: type[nn.Module] = nn.Identity, **changes: Any) -> Job:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(10, WIDE, generator=draw), torch.randint(4, (10,), generator=draw)
    settings: dict[str, Any] = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1)} | changes
    return Job(
        model=lambda: nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh(), middle(), nn.Linear(WIDE, 4)),
        data=lambda: [(x, y)] * 9,
        **settings,
    )


def contrastive(output: Tensor, batch: Any) -> Tensor:
    return functional.cross_entropy(output @ output.T, torch.arange(len(output)))


def summed(output: Tensor, batch: Any) -> Tensor:
    return functional.cross_entropy(output, batch[1], reduction="sum")


def tried(made: Job, small: bool = False) -> dict[str, str]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return made.model()

    return try_in_pieces(made, make, small=small)


@pytest.mark.parametrize(
    ("made", "found"),
    [
        (job(ActNorm), "a forward changes the weight 2.scale itself"),
        (job(Average16), "a forward changes the buffer 2.mean itself"),
        (job(Rows), "a forward changes the weight 2.rows.weight itself, to other values with each part of a batch"),
        (job(Seen), "a forward changes the buffer 2.seen itself, to other values with each part of a batch"),
        (job(Clamped), "a hook changes the gradient of the weight 2.scale, not in proportion"),
        (job(Counting), "the loss of a batch is not the mean of its pieces' losses"),
        (job(Mixup), "the loss of a batch is not the mean of its pieces' losses"),
        (job(Steered), "the model looks at numbers of a batch, and the loss of a batch is not the mean of its pieces'"),
        (job(loss=contrastive), "the loss of a batch is not the mean of its pieces' losses"),
        (job(loss=summed), "the loss of a batch is not the mean of its pieces' losses"),
    ],
    ids=[
        "initialised by data",
        "moving average",
        "looked up",
        "counts samples",
        "clips",
        "counts its calls",
        "mixup",
        "steered by the mean",
        "contrastive",
        "sum",
    ],
)
def test_what_depends_on_the_batch_is_found(made: Job, found: str) -> None:
    assert tried(made)["mixes samples"].startswith(found)
    assert tried(made, small=True)["mixes samples"].startswith(found)


@pytest.mark.parametrize(
    "made",
    [
        *map(job, (nn.Identity, Noisy, Masked, Watchful)),
        *map(listed, ("chain", "dropout chain", "gpt2", "llama", "vit", "t5", "mixtral")),
    ],
    ids=lambda made: type(made.model()).__name__,
)
def test_what_does_not_is_not_blamed_whatever_it_draws(made: Job) -> None:
    assert tried(made) == {}


def test_draws_from_outside_of_torch_are_told_and_not_taken_for_mixing() -> None:
    found = tried(job(Tossing))
    assert "mixes samples" not in found and "Python or NumPy" in found["draws"] and "not tried" in found


def test_a_model_that_can_not_be_trained_on_half_of_its_batch_is_planned_without_pieces() -> None:
    def whole_only(output: Tensor, batch: Any) -> Tensor:
        return functional.cross_entropy(output.reshape(10, 4), batch[1])

    ledger = Planner(job(loss=whole_only), Hardware()).ledger()
    assert "half of the batch can't be trained on" in Accumulate(2).refusal(ledger)


def test_pieces_that_change_the_result_are_not_chosen_unasked_and_told_when_asked_for() -> None:
    planner = Planner(job(loss=contrastive), Hardware(), catalogue=(Accumulate,))
    ledger = planner.ledger()
    assert Accumulate(2).exactness(ledger) is DataParallel().exactness(ledger) is Exactness.CHANGED
    outcome = planner.outcome_of(ledger, None)
    assert outcome.chosen.techniques == () and outcome.tried == 1
    assert "the loss of a batch is not the mean of its pieces' losses" in dict(outcome.refused)["Accumulate"]
    asked = planner.outcome_of(ledger, None, (Accumulate(2),)).chosen
    assert asked.exactness is Exactness.CHANGED
    assert "Accumulate(pieces=2) changes the result: the loss of a batch is not the mean" in asked.basis


def test_it_is_tried_in_the_workers_process_too(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text("""
import torch
from torch import nn
from shoestring import Job

def job() -> Job:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    return Job(model=lambda: nn.Linear(4, 4), data=lambda: [x] * 9, loss=lambda output, batch: (output @ output.T).square().mean())
""")
    assert "not the mean" in run_worker(AnchorTask(file=str(path), variants={"": ()}), {}).pieces["mixes samples"]
