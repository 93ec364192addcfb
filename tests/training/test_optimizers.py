"""Lamb and Lars: the papers' equations, written once more in NumPy, and jobs that train with them."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shoestring
from shoestring import Lamb, Lars, Mistake
from shoestring.core.costs.hardware import Hardware
from shoestring.core.running.run_weights import bring_home
from shoestring.data.feed import Feed
from shoestring.measure.timeline import peak
from shoestring.training.evidence.rehearse import build_run, rehearse, track
from shoestring.training.loop import steps
from shoestring.training.memory.offload import offload_optimizer as offload
from shoestring.training.memory.offload import offloaded_optimizer, streaming
from shoestring.training.memory.offload.offload_model import OffloadModel
from shoestring.training.memory.offload.offload_optimizer import OffloadOptimizer
from shoestring.training.planning.planner import Planner
from tests.models import job, seeded

Array = np.ndarray[Any, np.dtype[np.float64]]
SHAPES = ((5, 3), (7,), (2, 3, 4), ())


def drawn(seed: int) -> list[Array]:
    draw = np.random.default_rng(seed)
    return [draw.normal(size=shape) for shape in SHAPES]


def lamb(
    x: Array, slopes: list[Array], lr: float, decay: float, first: float = 0.9, second: float = 0.99, eps: float = 1e-6
) -> Array:
    """Algorithm 2 of arXiv 1904.00962 with phi(z) = z."""
    m, v = np.zeros_like(x), np.zeros_like(x)
    for t, g in enumerate(slopes, 1):
        m = first * m + (1 - first) * g
        v = second * v + (1 - second) * g**2
        r = (m / (1 - first**t)) / (np.sqrt(v / (1 - second**t)) + eps)
        x = x - lr * np.linalg.norm(x) / np.linalg.norm(r + decay * x) * (r + decay * x)
    return x


def lars(x: Array, slopes: list[Array], lr: float, decay: float, momentum: float = 0.9, eta: float = 0.02) -> Array:
    """Algorithm 1 of arXiv 1708.03888."""
    v = np.zeros_like(x)
    for g in slopes:
        local = eta * np.linalg.norm(x) / (np.linalg.norm(g) + decay * np.linalg.norm(x))
        v = momentum * v + lr * local * (g + decay * x)
        x = x - v
    return x


def moved(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], start: list[Array], slopes: list[list[Array]]
) -> list[Array]:
    """Where an optimizer brings parameters with these gradients, step by step."""
    parameters = [nn.Parameter(torch.tensor(one)) for one in start]
    optimizer = make(parameters)
    for now in slopes:
        for parameter, slope in zip(parameters, now, strict=True):
            parameter.grad = torch.tensor(slope)
        optimizer.step()
    return [parameter.detach().numpy() for parameter in parameters]


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_lamb_and_lars_follow_the_equations_of_their_papers(decay: float) -> None:
    start, slopes = drawn(0), [drawn(seed) for seed in range(1, 6)]
    found = moved(lambda p: Lamb(p, lr=0.1, betas=(0.9, 0.99), weight_decay=decay), start, slopes)
    other = moved(lambda p: Lars(p, lr=0.5, weight_decay=decay, trust_coefficient=0.02), start, slopes)
    for number, x in enumerate(start):
        mine = [now[number] for now in slopes]
        np.testing.assert_allclose(found[number], lamb(x, mine, 0.1, decay), rtol=1e-10)
        np.testing.assert_allclose(other[number], lars(x, mine, 0.5, decay), rtol=1e-10)


def test_momentum_of_lars_is_what_its_group_says() -> None:
    start, slopes = drawn(0), [drawn(seed) for seed in range(1, 4)]
    for momentum in (0.0, 0.5):
        found = moved(lambda p, momentum=momentum: Lars(p, momentum=momentum, trust_coefficient=0.02), start, slopes)  # type: ignore[misc]
        for number, x in enumerate(start):
            np.testing.assert_allclose(
                found[number], lars(x, [now[number] for now in slopes], 1.0, 0.0, momentum), rtol=1e-10
            )


def test_every_group_has_settings_of_its_own_and_a_rate_that_changes_is_seen() -> None:
    start, slopes = drawn(0), [drawn(1)]

    def grouped(kind: Any) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
        def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
            made: torch.optim.Optimizer = kind(
                [{"params": parameters[:2], "lr": 0.3, "weight_decay": 0.0}, {"params": parameters[2:]}],
                lr=123.0,
                weight_decay=0.2,
            )
            made.param_groups[1]["lr"] = 0.1  # as a schedule does
            return made

        return make

    for kind, by_hand in ((partial(Lamb, betas=(0.9, 0.99)), lamb), (partial(Lars, trust_coefficient=0.02), lars)):
        found = moved(grouped(kind), start, slopes)
        for number, (lr, decay) in enumerate([(0.3, 0.0), (0.3, 0.0), (0.1, 0.2), (0.1, 0.2)]):
            np.testing.assert_allclose(
                found[number], by_hand(start[number], [slopes[0][number]], lr, decay), rtol=1e-10
            )


def test_where_a_norm_is_zero_the_trust_ratio_is_one() -> None:
    nothing, something = np.zeros(4), np.full(4, 2.0)
    (found,) = moved(lambda p: Lamb(p, lr=0.1, weight_decay=0.0), [nothing], [[something]])
    np.testing.assert_allclose(found, nothing - 0.1, rtol=1e-5)  # Adam's first step has length lr
    (found,) = moved(lambda p: Lars(p, lr=0.1), [nothing], [[something]])
    np.testing.assert_allclose(found, -0.1 * something)
    for kind in (Lamb, Lars):
        (found,) = moved(lambda p, kind=kind: kind(p, lr=0.1, weight_decay=0.0), [something], [[nothing]])  # type: ignore[misc]
        np.testing.assert_array_equal(found, something)
    (found,) = moved(lambda p: Lars(p, lr=0.1, weight_decay=0.5), [something], [[nothing]])
    np.testing.assert_allclose(found, something - 0.1 * 0.5 * something)


def test_spared_vectors_are_moved_without_decay_and_trust_ratio() -> None:
    start, slopes = drawn(0), [drawn(1), drawn(2)]
    found = moved(lambda p: Lamb(p, lr=0.1, betas=(0.9, 0.99), weight_decay=0.3, spare_vectors=True), start, slopes)
    adam = moved(lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.9, 0.99), eps=1e-6), start, slopes)
    other = moved(
        lambda p: Lars(p, lr=0.1, weight_decay=0.3, trust_coefficient=0.02, spare_vectors=True), start, slopes
    )
    sgd = moved(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), start, slopes)
    for number, x in enumerate(start):
        mine = [now[number] for now in slopes]
        vector = x.ndim <= 1
        np.testing.assert_allclose(found[number], adam[number] if vector else lamb(x, mine, 0.1, 0.3), rtol=1e-10)
        np.testing.assert_allclose(other[number], sgd[number] if vector else lars(x, mine, 0.1, 0.3), rtol=1e-10)


@pytest.mark.parametrize("make", [lambda p: Lamb(p, lr=0.1), lambda p: Lars(p, weight_decay=0.1)])
def test_what_was_saved_goes_on_to_the_same_bits(make: Any) -> None:
    parameter, slopes = nn.Parameter(torch.tensor(drawn(0)[0])), [torch.tensor(drawn(seed)[0]) for seed in range(1, 7)]
    optimizer = make([parameter])
    for slope in slopes[:3]:
        parameter.grad = slope
        optimizer.step()
    again = nn.Parameter(parameter.detach().clone())
    other = make([again])
    other.load_state_dict(deepcopy(optimizer.state_dict()))
    for slope in slopes[3:]:
        parameter.grad = again.grad = slope
        optimizer.step()
        other.step()
    assert torch.equal(parameter, again)


def test_a_closure_is_evaluated_and_its_loss_given_back() -> None:
    parameter = nn.Parameter(torch.ones(3))

    def closure() -> float:
        loss = (parameter**2).sum()
        loss.backward()
        return float(loss.detach())

    assert Lamb([parameter], lr=0.1).step(closure) == 3.0
    assert float(parameter.detach().max()) < 1.0


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: Lamb(p, lr=-1.0), "Lamb(lr=-1.0): give 0 or more"),
        (lambda p: Lamb(p, betas=(0.9, 1.0)), "less than 1"),
        (lambda p: Lars(p, momentum=1.5), "less than 1"),
    ],
)
def test_settings_that_cannot_work_are_told_of(make: Any, said: str) -> None:
    with pytest.raises(Mistake) as told:
        make([nn.Parameter(torch.ones(2))])
    assert said in str(told.value)


def test_a_sparse_gradient_is_told_of() -> None:
    words = nn.Embedding(5, 2, sparse=True)
    words(torch.tensor([1])).sum().backward()
    with pytest.raises(Mistake, match="sparse=False"):
        Lamb(words.parameters()).step()


OPTIMIZERS = {
    "lamb": lambda parameters: Lamb(parameters, lr=0.01),
    "lars": lambda parameters: Lars(parameters, lr=20.0),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["chain", "gpt2"])
def test_a_job_with_them_is_planned_and_trained(name: str, optimizer: str) -> None:
    made = job(name, optimizer=OPTIMIZERS[optimizer], steps=8)
    outcome = Planner(made, Hardware()).outcome(8 << 30)
    assert "FusedOptimizer" not in str(outcome.chosen) and dict(outcome.refused)["FusedOptimizer"]
    losses = [step.loss for step in shoestring.train(made, outcome)]
    assert losses[-1] < 0.95 * losses[0]
    predicted, measured = rehearse(made, ()), track(made, (), seeded(made))
    assert peak(predicted).bytes == peak(measured).bytes


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("technique", [OffloadModel(), OffloadOptimizer()])
def test_a_trust_ratio_is_over_the_whole_parameter_wherever_its_state_lives(
    technique: Any, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (offloaded_optimizer, offload, streaming):
        monkeypatch.setattr(module, "SMALL", 256)
    monkeypatch.setattr(
        offloaded_optimizer, "CHUNK", 1024
    )  # an optimizer whose numbers do not need each other would be cut
    made = job("gpt2", optimizer=OPTIMIZERS[optimizer])
    after = []
    for techniques in ((), (technique,)):
        run = build_run(made, techniques, seeded(made))
        list(steps(run, [next(iter(Feed(made)))] * 3))
        bring_home(run)
        after.append(run.model.state_dict())
    assert all(torch.equal(after[0][name], after[1][name]) for name in after[0])
