"""What is computed again is the same, in models that make it hard: batch norm, dropout, skips, shared blocks, layer drop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from shoestring import Job, Mistake
from shoestring.data.feed import Feed
from shoestring.training.evidence.rehearse import build_run
from shoestring.training.library import verify
from shoestring.training.loop import steps
from shoestring.training.memory.offload.offload_activations import OffloadActivations
from shoestring.training.memory.recompute.checkpoint import Checkpoint
from shoestring.training.technique import TrainingTechnique
from tests.models import MODELS, job, seeded


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("wav2vec2",)])
def test_every_model_trains_to_the_same_bits_with_everything_computed_again(name: str) -> None:
    equal, most = verify(job(name), (Checkpoint(every=2),), 3)
    assert equal, most


@pytest.mark.parametrize(
    "schedule", ["((0,1,2),(3,4,5))", "(0,(1,(2,3)),4,5)", "((0,(1,(2,(3,(4,))))),5)", "((0,),(1,),2,3,4,(5,))"]
)
@pytest.mark.parametrize("name", ["dropout chain", "u-net"])
def test_nested_schedules_give_the_same_bits(name: str, schedule: str) -> None:
    assert verify(job(name), (Checkpoint(schedule=schedule),), 4)[0]


class Called(nn.Module):
    """Calls its blocks in a way that leaves nobody else a say in what autograd saves."""

    def __init__(self, way: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.way = way
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.way(block, x)
        return x


def in_half(block: nn.Module, x: Tensor) -> Tensor:
    with saved_tensors_hooks(torch.Tensor.half, torch.Tensor.float):
        return block(x)  # type: ignore[no-any-return]


def on_the_cpu(block: nn.Module, x: Tensor) -> Tensor:
    with save_on_cpu():
        return block(x)  # type: ignore[no-any-return]


def mapped(block: nn.Module, x: Tensor) -> Tensor:
    return torch.vmap(block)(x)


@pytest.mark.parametrize("technique", [Checkpoint(every=1), OffloadActivations()], ids=str)
@pytest.mark.parametrize(
    ("way", "told"),
    [(in_half, "the model changes what autograd saves"), (mapped, "in a transform of torch.func"), (on_the_cpu, "")],
)
def test_what_autograd_saves_is_left_alone_where_the_model_decides_it(
    technique: TrainingTechnique, way: Callable[[nn.Module, Tensor], Tensor], told: str
) -> None:
    made = Job(lambda: Called(way), [torch.ones(4, 8)] * 2, loss=lambda output, batch: output.square().mean(), steps=2)
    with pytest.raises(Mistake, match=told) if told else nullcontext():
        assert verify(made, (technique,), 2).same_bits


def test_batch_norm_counts_every_batch_once() -> None:
    made = job("u-net")
    model = seeded(made)
    for _ in steps(build_run(made, (Checkpoint(every=1),), model), islice(Feed(made), 3)):
        pass
    assert model.down[0][1].num_batches_tracked == 3


class Moving(nn.Module):
    """Keeps a running mean of its own and uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.work = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return torch.tanh(self.work(x) - self.mean)


class Remembering(nn.Module):
    """Keeps what it said last, and how often it was asked, as plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.work = nn.Linear(8, 8)
        self.last: Tensor | None = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        said: Tensor = torch.tanh(self.work(x)) / self.calls
        if self.last is not None:
            said = said + 0.5 * self.last
        self.last = said.detach()
        return said


class Making(Remembering):
    """Has what it said last only once it said something."""

    def __init__(self) -> None:
        super().__init__()
        del self.last

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "last"):
            self.last = torch.zeros_like(x)
        return super().forward(x)


class TableCache:
    """Something that a model hands to its blocks, and calls so."""

    def __init__(self) -> None:
        self.table = torch.linspace(0.5, 2.0, 8)


class TakesCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(8, 8)

    def forward(self, x: Tensor, cache: TableCache | None) -> Tensor:
        return x + torch.tanh(self.into(x if cache is None else x * cache.table))


class HandsCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.cache = nn.ModuleList(TakesCache() for _ in range(3)), TableCache()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, cache=self.cache)
        return x


def test_a_cache_of_the_model_s_own_reaches_its_blocks() -> None:
    """Those of transformers are for generation, and left out."""
    assert verify(replace(moving_job(), model=HandsCache), (Checkpoint(every=1),), 3)[0]


def moving_job(block: type[nn.Module] = Moving) -> Job:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    return Job(
        model=lambda: nn.Sequential(block(), block(), block()),
        data=lambda: [x] * 5,
        loss=lambda output, batch: output.square().mean(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )


@pytest.mark.parametrize(
    "technique", [Checkpoint(every=1), Checkpoint(every=3), Checkpoint(schedule="((0,(1,),2),)"), OffloadActivations()]
)
@pytest.mark.parametrize("block", [Moving, Remembering, Making])
def test_what_the_forward_changes_and_uses_stays_right(
    block: type[nn.Module], technique: Checkpoint | OffloadActivations
) -> None:
    assert verify(moving_job(block), (technique,), 5)[0]


def test_the_model_is_left_as_it_was() -> None:
    made = job("chain")
    model = seeded(made)
    for _ in steps(build_run(made, (Checkpoint(every=1), OffloadActivations()), model), islice(Feed(made), 2)):
        pass
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_evaluation_without_gradients_is_untouched() -> None:
    made = job("chain")
    run = build_run(made, (Checkpoint(every=2), OffloadActivations()), seeded(made))
    with torch.no_grad():
        assert run.forward(run.model, next(Feed(made))).shape == (32, 10)
