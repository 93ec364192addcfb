"""A forward that looks at values is measured on real tensors; no value is invented for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shoestring import Job
from shoestring.core.costs.hardware import Hardware
from shoestring.core.errors import Mistake
from shoestring.measure.fake import LooksAtValues
from shoestring.measure.timeline import peak
from shoestring.training.evidence import rehearsals
from shoestring.training.evidence.rehearse import rehearse, track
from shoestring.training.memory.recompute.checkpoint import Checkpoint
from shoestring.training.planning.planner import Planner
from tests.models import seeded

WIDTH = 32


class Steered(nn.Module):
    """Goes one of two ways, which need different memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide, self.back = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 16 * WIDTH),
            nn.Linear(16 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.back(torch.tanh(self.wide(x))) if self.chosen(x) else x

    def chosen(self, x: Tensor) -> bool:
        return bool(x.abs().mean() > 0)


class ByItem(Steered):
    def chosen(self, x: Tensor) -> bool:
        return x.abs().sum().item() != 0


class ByBuffer(Steered):
    """Looks at a buffer, into which something that depends on weights was written."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def chosen(self, x: Tensor) -> bool:
        self.seen.data.add_(x.detach().abs().sum())
        return bool(self.seen * 2 > 0)


class ByIndex(Steered):
    def chosen(self, x: Tensor) -> bool:
        return [False, True][int(x.abs().amax() > 0)]


class Experts(nn.Module):
    """Each sample goes to the expert that a router chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = gates.argmax(-1) == number
            if chosen.any():
                out[chosen] = expert(x[chosen]) * gates[chosen][:, number : number + 1]
        return out


KINDS: list[type[nn.Module]] = [Steered, ByItem, ByBuffer, ByIndex, Experts]


def job_of(model: Callable[[], nn.Module]) -> Job:
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(0))
    return Job(model=model, data=lambda: [x] * 4, loss=lambda output, batch: output.square().mean(), steps=2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rehearsal_does_not_invent_what_depends_on_weights(kind: type[nn.Module]) -> None:
    with pytest.raises((LooksAtValues, RuntimeError)):
        rehearse(job_of(kind), ())


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_for_it_is_measured_and_says_so(kind: type[nn.Module]) -> None:
    made = job_of(kind)
    found = Planner(made, Hardware()).outcome(None, forced=())
    assert found.chosen.predicted["peak_bytes"] == peak(track(made, (), seeded(made))).bytes
    assert "measured on real tensors and the first batches" in found.chosen.basis


def test_the_users_own_model_is_not_touched_by_that() -> None:
    made = job_of(Steered)
    model = seeded(made)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    Planner(made, Hardware(), model=model).outcome(None, forced=())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_where_there_is_no_room_to_try_it_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsals, "memory_free", lambda: 1000)
    with pytest.raises(Mistake, match=r"looks at a value that depends on weights.*write a job file"):
        Planner(job_of(Steered), Hardware()).rehearsals.log(())


class OnlyWhenComputedAgain(Steered):
    """Looks at values only inside a block's second run, as a check for errors may."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.back(self.wide(x)) if "forward" in self.blocks[0].__dict__ and self.chosen(x) else x


def test_a_plan_that_alone_looks_at_values_is_alone_measured() -> None:
    asked = Planner(job_of(OnlyWhenComputedAgain), Hardware())
    assert "fake tensors" in asked.outcome(None, forced=()).chosen.basis
    assert "real tensors" in asked.outcome(None, forced=(Checkpoint(every=1),)).chosen.basis
