"""Planning leaves what a job's functions keep as it found it: nobody trains from a state that planning made, or on fake tensors."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shoestring
from shoestring import Job
from shoestring.core.exactness import Exactness
from shoestring.training.memory.accumulate import Accumulate
from shoestring.training.memory.recompute.checkpoint import Checkpoint
from shoestring.training.planning.named_plan import check_named

BATCHES = [(torch.ones(4, 6) * number, torch.zeros(4, 6)) for number in range(1, 4)]
Batch = tuple[Tensor, Tensor]
Kept = tuple[Callable[[Tensor, Batch], Tensor], Callable[[], Any]]  # a loss, and what it keeps now


def distance(output: Tensor, batch: Batch) -> Tensor:
    return nn.functional.mse_loss(output, batch[1])


def running_mean() -> Kept:
    mean, count = torch.zeros(()), 0

    def loss(output: Tensor, batch: Batch) -> Tensor:
        nonlocal mean, count
        found = distance(output, batch)
        mean, count = 0.9 * mean + 0.1 * found.detach(), count + 1
        return found / (1 + mean)

    return loss, lambda: (float(mean), count)


def queue() -> Kept:
    """Of negatives, as in MoCo."""
    held = SimpleNamespace(rows=torch.zeros(8, 6), place=0)

    def loss(output: Tensor, batch: Batch) -> Tensor:
        found = distance(output, batch) + (output @ held.rows.clone().T).square().mean()
        held.rows[held.place : held.place + len(output)] = output.detach()
        held.place = (held.place + len(output)) % 8
        return found

    return loss, lambda: (held.rows.tolist(), held.place)


class Centred(nn.Module):
    """A centre in a buffer, losses in a list and a deque, an array, a counter of its class, a generator."""

    centre: Tensor
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        Centred.calls = 0
        self.register_buffer("centre", torch.zeros(6))
        self.losses, self.last = list[Tensor](), deque[int](maxlen=2)
        self.table, self.chance, self.kinds = np.zeros(2), torch.Generator().manual_seed(1), Counter[str]()

    def forward(self, output: Tensor, batch: Batch) -> Tensor:
        found = distance(output - self.centre, batch) + torch.rand((), generator=self.chance)
        self.centre.mul_(0.9).add_(output.detach().mean(0))
        Centred.calls += 1
        self.losses.append(found.detach())
        self.last.append(Centred.calls)
        self.table += 1
        self.kinds["seen"] += 1
        return found

    def kept(self) -> Any:
        return (
            self.centre.tolist(),
            *(Centred.calls, len(self.losses), list(self.last), self.table.tolist(), dict(self.kinds)),
            self.chance.get_state().tolist(),
        )


def centred() -> Kept:
    made = Centred()
    return made, made.kept


TEACHER: Any = None


def taught(output: Tensor, batch: Batch) -> Tensor:
    global TEACHER
    TEACHER = TEACHER or nn.Linear(6, 6)
    return nn.functional.mse_loss(output, TEACHER(batch[0]).detach())


def lazy_teacher() -> Kept:
    global TEACHER
    TEACHER = None
    return taught, lambda: TEACHER


KEPT = (running_mean, queue, centred, lazy_teacher)


def net() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))


def job_of(loss: Callable[[Tensor, Batch], Tensor]) -> Job:
    return Job(
        model=net,
        data=lambda: BATCHES,
        loss=loss,
        steps=3,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )


@pytest.mark.parametrize("make", KEPT, ids=lambda make: make.__name__)
def test_a_loss_keeps_what_it_kept_before_it_was_planned_for(make: Callable[[], Kept]) -> None:
    loss, kept = make()
    before, made = kept(), job_of(loss)
    shoestring.plan(made, memory="8GiB")
    assert kept() == before
    assert check_named(made, (Checkpoint(every=1),)) is Exactness.BITS and kept() == before
    assert shoestring.verify(made, (Checkpoint(every=1),), 3).same_bits and kept() == before


def test_a_loss_over_earlier_batches_is_no_mean_over_samples_whatever_planning_did_before() -> None:
    assert check_named(job_of(running_mean()[0]), (Accumulate(2),)) is Exactness.CHANGED


def test_a_cache_is_left_alone() -> None:
    @cache
    def table(width: int) -> Tensor:
        return torch.ones(width)

    table(6)
    made = job_of(lambda output, batch: distance(output * table(6), batch))
    shoestring.plan(made, memory="8GiB")
    assert table.cache_info().currsize == 1 and bool(table(6).all())
