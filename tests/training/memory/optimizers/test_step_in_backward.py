"""Weights that are updated during a backward, or leave memory in it: whatever needs their old numbers later is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from shoestring import Job, Mistake
from shoestring.core.running.run_weights import bring_home
from shoestring.training.evidence.rehearse import build_run, rehearse
from shoestring.training.loop import steps
from shoestring.training.memory.accumulate import Accumulate
from shoestring.training.memory.offload import offloaded_optimizer, streaming
from shoestring.training.memory.offload.offload_model import OffloadModel
from shoestring.training.memory.optimizers.step_in_backward import StepInBackward
from shoestring.training.memory.recompute.checkpoint import Checkpoint
from shoestring.training.technique import TrainingTechnique as Technique
from tests.models import seeded

WIDTH, HEAD = 12, 48
UPDATING: tuple[tuple[Technique, ...], ...] = (
    (StepInBackward(),),
    (Checkpoint(every=1), StepInBackward()),
    (OffloadModel(),),
    (Accumulate(2), OffloadModel()),
)


class UsedTwice(nn.Module):
    """Uses a weight first without a gradient, as `without` gives it, and then with one."""

    def __init__(self, without: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.into, self.without = nn.Linear(WIDTH, WIDTH), without

    def forward(self, x: Tensor) -> Tensor:
        still = functional.linear(torch.tanh(x), self.without(self.into.weight))
        return x + torch.tanh(self.into(still))


def job(block: Callable[[], nn.Module], forward: Callable[[nn.Module, Any], Any] = lambda model, x: model(x)) -> Job:
    batch = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(0))
    return Job(
        model=lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), *(block() for _ in range(4)), nn.Linear(WIDTH, HEAD)),
        data=lambda: [batch] * 3,
        forward=forward,
        loss=lambda output, x: output.square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        steps=3,
    )


def weights_after(made: Job, techniques: tuple[Technique, ...]) -> list[Tensor]:
    run = build_run(made, techniques, seeded(made))
    for _ in steps(run, iter(made.data())):
        pass
    bring_home(run)
    return [value.clone() for value in run.model.state_dict().values()]


@pytest.mark.parametrize("plan", UPDATING, ids=str)
@pytest.mark.parametrize(
    "without",
    [lambda weight: weight.data, Tensor.detach, lambda weight: torch.from_numpy(weight.detach().numpy())],
    ids=["data", "detach", "numpy"],
)
def test_a_weight_that_backward_reads_after_its_update_is_refused(
    without: Callable[[Tensor], Tensor], plan: tuple[Technique, ...]
) -> None:
    with pytest.raises(Mistake, match=r"numbers of the weight .* without a gradient"):
        weights_after(job(lambda: UsedTwice(without)), plan)


@pytest.mark.parametrize("plan", UPDATING[:3], ids=str)
def test_a_copy_of_a_weight_is_fine(plan: tuple[Technique, ...]) -> None:
    made = job(lambda: UsedTwice(lambda weight: weight.detach().clone()))
    assert all(map(torch.equal, weights_after(made, ()), weights_after(made, plan)))


def test_the_rehearsal_notices_it() -> None:
    with pytest.raises(Mistake, match="StepInBackward has updated the weight"):
        rehearse(job(lambda: UsedTwice(Tensor.detach)), (StepInBackward(),))


class Penalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.into(x))


def slope_of(model: nn.Module, x: Tensor, create_graph: bool) -> Tensor:
    given = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(given).square().sum(), given, create_graph=create_graph)
    return model(x)[:, :WIDTH] + slope  # type: ignore[no-any-return]


def test_a_gradient_penalty_keeps_its_bits_or_is_refused() -> None:
    """A backward that is differentiated keeps weights in its graph, and those of OffloadModel have left by then."""
    made = job(Penalised, lambda model, x: slope_of(model, x, create_graph=True))
    for plan in UPDATING[:2]:
        assert all(map(torch.equal, weights_after(made, ()), weights_after(made, plan)))
    with pytest.raises(Mistake, match="differentiates a backward"):
        weights_after(made, (OffloadModel(),))
    plain = job(Penalised, lambda model, x: slope_of(model, x, create_graph=False))
    assert all(map(torch.equal, weights_after(plain, ()), weights_after(plain, (OffloadModel(),))))


def half_frozen(model: nn.Module) -> nn.Module:
    """The last layer of a model trains every second row alone, by a hook on its gradient."""
    weight = model[-1].weight  # type: ignore[index]
    rows = (torch.arange(len(weight)) % 2).unsqueeze(1)
    weight.register_hook(lambda slope: slope * rows)
    return model


def test_hooks_on_the_weight_of_a_large_head_are_called(small: None) -> None:
    made = job(Penalised)
    with_hook = replace(made, model=lambda: half_frozen(made.model()))
    plain = weights_after(with_hook, ())
    assert all(map(torch.equal, plain, weights_after(with_hook, (OffloadModel(),))))
    assert not all(map(torch.equal, plain, weights_after(made, ())))


def test_a_backward_of_the_job_s_own_through_a_head_in_row_ranges_is_refused(small: None) -> None:
    with pytest.raises(Mistake, match="backward of its own"):
        weights_after(job(Penalised, lambda model, x: slope_of(model, x, create_graph=False)), (OffloadModel(),))
    assert weights_after(job(Penalised), (OffloadModel(),))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that the last layer of `job` is wider than a block, and is split."""
    for module in (offloaded_optimizer, streaming):
        monkeypatch.setattr(module, "SMALL", 16)
