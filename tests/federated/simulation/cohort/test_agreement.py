"""Losses and models that are no plain mean over samples, on devices of unequal size, against federated averaging by hand.

The first three clients are large and alike; what comes after them is smaller than a batch, has a batch of one sample left over, or is one
sample. Every shape comes more often than recordings need.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoestring.core.clients.local import Local
from shoestring.core.job import Job, default_loss
from tests.federated.simulation.cohort.fedavg import by_hand, by_shoestring, draw, initial

COUNTS = (24, 30, 24, 7, 1, 5, 2, 13)
WITHOUT_ONES = (24, 30, 24, 8, 5, 2, 14, 3)  # a batch norm can't train on one sample
ROUNDS, WIDTH, CLASSES = 2, 6, 4
CLOSE = 1e-4


def clients(counts: Sequence[int], padded: bool = False) -> Callable[[], dict[str, TensorDataset]]:
    """`padded`: most targets of the later clients are left out, so that the loss of some batches is 0 / 0 and their gradient 0."""

    def made() -> dict[str, TensorDataset]:
        found = {}
        for number, count in enumerate(counts):
            generator = torch.Generator().manual_seed(number)
            targets = torch.randint(CLASSES, (count,), generator=generator)
            inputs = torch.randn(count, WIDTH, generator=generator) + F.one_hot(targets, WIDTH)
            if padded and number > 3 and count > 2:
                targets[torch.arange(count) % 5 > 0] = -100
            found[f"c{number}"] = TensorDataset(inputs, targets)
        return found

    return made


class Net(nn.Module):
    """A small network that only vmap can stack."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(WIDTH, 8), nn.LayerNorm(8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.norm(self.one(x))))  # type: ignore[no-any-return]


class BatchNormed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, track_running_stats=False)  # type: ignore[assignment]


class InPlace(Net):
    """Normalises its input where it lies."""

    def forward(self, x: Tensor) -> Tensor:
        x.sub_(x.mean()).mul_(3)
        return super().forward(x)


class BufferCounting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1 + 1 / self.calls)


class Counting(Net):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1.0 if self.calls < 20 else 0.5)


class DroppedByNumpy(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x)) if draw() < 0.3 else torch.tanh(self.norm(self.one(x))))  # type: ignore[no-any-return]


class DroppedByPython(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (0.2 if random.random() < 0.3 else 1.0)


class Steered(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else 2 * x)


class Clamped(Net):
    """Keeps its weights small, in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.one.weight.clamp_(-0.3, 0.3)
        return super().forward(x)


class Hooked(Net):
    """Clips gradients by hooks, so that few of them are changed."""

    def __init__(self) -> None:
        super().__init__()
        self.one.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


class HookedLater(Net):
    def __init__(self) -> None:
        super().__init__()

        def halve(weight: Tensor) -> None:
            assert weight.grad is not None
            weight.grad.mul_(0.5)

        self.two.weight.register_post_accumulate_grad_hook(halve)


class HookedInside(Net):
    """A hook on what is between two layers, which rarely does anything."""

    def forward(self, x: Tensor) -> Tensor:
        between = torch.tanh(self.norm(self.one(x)))
        if between.requires_grad:
            between.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
        return self.two(between)  # type: ignore[no-any-return]


def sequential_with_hook() -> nn.Module:
    made = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    made[1].register_forward_hook(lambda module, given, out: out.clamp(max=2.5))
    return made


def sequential_with_backward_hook() -> nn.Module:
    made = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    made[2].register_full_backward_hook(
        lambda module, into, out: tuple(None if one is None else one * 0.3 for one in into)
    )
    return made


def weight_normed() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 8)), nn.Tanh(), nn.Linear(8, CLASSES))


def used_twice() -> nn.Module:
    again = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(again, nn.ReLU(), again, nn.ReLU(), nn.Linear(WIDTH, CLASSES))


class UsedTwice(nn.Module):
    """A layer under three names, two of whose weights are one tensor, too."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.two, self.rest = self.one, nn.ModuleList([self.one, nn.Linear(WIDTH, WIDTH)])
        self.rest[1].weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.one, self.two, *self.rest):
            x = torch.tanh(layer(x))
        return self.head(x)  # type: ignore[no-any-return]


def class_weighted(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output, batch[1], weight=torch.tensor([0.1, 1.0, 4.0, 0.5]))


def summed(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output, batch[1], reduction="sum") / 8


def contrastive(output: Tensor, batch: Any) -> Tensor:
    rows = F.normalize(output, dim=1)
    return F.cross_entropy(rows @ rows.T / 0.5, torch.arange(len(rows)))


def spread(output: Tensor, batch: Any) -> Tensor:
    return default_loss(output, batch) + 0.1 * output.var(0, correction=0).sum()


def clamped_by_batch(output: Tensor, batch: Any) -> Tensor:
    return default_loss(output, batch) / len(output) ** 0.5


CASES: dict[str, dict[str, Any]] = {
    "plain mean": {},
    "class weights": {"loss": class_weighted},
    "sum": {"loss": summed},
    "contrastive": {"loss": contrastive},
    "spread": {"loss": spread},
    "by the batch's size": {"loss": clamped_by_batch},
    "padding": {"clients": clients(COUNTS, padded=True)},
    "batch norm": {"model": BatchNormed, "clients": clients(WITHOUT_ONES)},
    "batch norm, ones": {"model": BatchNormed},
    "in place": {"model": InPlace},
    "buffer": {"model": BufferCounting},
    "attribute": {"model": Counting},
    "numpy": {"model": DroppedByNumpy},
    "python": {"model": DroppedByPython},
    "steered": {"model": Steered},
    "clamped": {"model": Clamped},
    "hook": {"model": Hooked},
    "hook behind": {"model": HookedLater},
    "hook inside": {"model": HookedInside},
    "module hook": {"model": sequential_with_hook},
    "backward hook": {"model": sequential_with_backward_hook},
    "parametrized": {"model": weight_normed},
    "layer twice": {"model": used_twice},
    "layer of several names": {"model": UsedTwice},
}


def job_of(changes: dict[str, Any]) -> Job:
    usual = {
        "model": Net,
        "data": list,
        "clients": clients(COUNTS),
        "local": Local(epochs=10, batch=6, lr=0.05),
        "seed": 3,
    }
    return Job(**{**usual, **changes})


QUICK = ("class weights", "padding", "batch norm", "in place", "buffer", "numpy", "hook inside", "layer twice")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]
)
def test_the_weights_are_those_of_averaging_by_hand_with_any_number_of_processes(name: str) -> None:
    job = job_of(CASES[name])
    right, start = by_hand(job, ROUNDS), initial(job)
    found, simulation = by_shoestring(job, ROUNDS)
    apart = float((found - right).norm() / (right - start).norm())
    assert apart <= CLOSE, f"off by {apart:.2g}: {simulation.given.how}"
    assert not simulation.fallback_reason, "what the trial can know is not found out later"
    assert torch.equal(found, by_shoestring(job, ROUNDS, processes=2)[0])
