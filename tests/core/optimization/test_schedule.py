"""A schedule: stepped when it should be, by every kind of scheduler, and the same after a restart; or refused with the way out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lr

import shoestring
from shoestring import Job, Mistake, PerEpoch
from shoestring.core.workers.link import Link
from shoestring.core.workers.mesh import on_one_axis
from shoestring.data.feed import first_steps
from shoestring.runs.events.event import Stepped
from shoestring.training.data_parallel.parameter_server.asynchronous import Asynchronous
from shoestring.training.evidence.rehearse import rehearse
from shoestring.training.execution.training import train
from tests.interrupted import trained
from tests.tasks import train_task

STEPS = 12
DRAW = torch.Generator().manual_seed(3)
BATCHES = [(torch.randn(4, 3, generator=DRAW), torch.tensor([0, 1, 1, 0])) for _ in range(5)]


class Grown:
    """A factor that remembers: an object in a LambdaLR, whose state is numbers."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 1.0 / (1 + self.calls)


KINDS: dict[str, Callable[..., Any]] = {
    "lambda": lambda o: lr.LambdaLR(o, lambda step: 0.9**step),
    "object": lambda o: lr.LambdaLR(o, Grown()),
    "partial": lambda o: lr.LambdaLR(o, partial(lambda base, step: base**step, 0.8)),
    "multiplicative": lambda o: lr.MultiplicativeLR(o, lambda step: 0.95),
    "step": lambda o: lr.StepLR(o, 3, 0.5),
    "multi-step": lambda o: lr.MultiStepLR(o, [2, 5, 9], 0.3),
    "constant": lambda o: lr.ConstantLR(o, 0.3, 4),
    "linear": lambda o: lr.LinearLR(o, 0.1, 1.0, 7),
    "exponential": lambda o: lr.ExponentialLR(o, 0.9),
    "polynomial": lambda o: lr.PolynomialLR(o, 10, 2.0),
    "cosine": lambda o, steps: lr.CosineAnnealingLR(o, steps, 0.01),
    "restarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 3, 2),
    "one cycle": lambda o, steps: lr.OneCycleLR(o, 0.2, steps),
    "cyclic": lambda o: lr.CyclicLR(o, 0.01, 0.2, 3, mode="exp_range", gamma=0.9),
    "chained": lambda o: lr.ChainedScheduler([lr.ConstantLR(o, 0.5, 3), lr.ExponentialLR(o, 0.9)]),
    "sequential": lambda o: lr.SequentialLR(o, [lr.LinearLR(o, 0.1, 1.0, 4), lr.MultiStepLR(o, [3, 5], 0.5)], [4]),
    "swa": lambda o: torch.optim.swa_utils.SWALR(o, 0.001, 4),
    "warmup cosine": shoestring.warmup_cosine(0.25, floor=0.1),
    "warmup linear": shoestring.warmup_linear(3),
}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def job(**more: Any) -> Job:
    return Job(
        **{
            "model": lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)),
            "data": lambda: BATCHES,
            "steps": STEPS,
            "optimizer": sgd,
        }
        | more
    )


def by_hand(made: Job, schedule: Callable[[torch.optim.Optimizer], Any]) -> torch.Tensor:
    """The loop that everybody writes with torch alone."""
    torch.manual_seed(made.seed)
    model = made.model()
    optimizer = made.optimizer(model.parameters())
    scheduler = schedule(optimizer)
    for number in range(made.steps):
        x, y = BATCHES[number % len(BATCHES)]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()
    return torch.cat([value.reshape(-1) for value in model.state_dict().values()])


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_scheduler_is_that_of_a_loop_by_hand_and_the_same_after_restarts(
    kind: str, tmp_path: Path
) -> None:
    made, asks = job(schedule=KINDS[kind]), KINDS[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = trained(made, (), tmp_path / "whole")
        parted = trained(made, (), tmp_path / "parted", stops=(1, 4, 5, 11))
    expected = by_hand(made, lambda o: asks(o, STEPS) if asks.__code__.co_argcount == 2 else asks(o))
    assert torch.equal(whole.weights, expected)
    assert torch.equal(parted.weights, expected) and parted.rates == whole.rates
    assert len(set(whole.rates)) > 1, "a schedule that changes nothing shows nothing"


def test_a_rate_that_is_a_tensor_is_the_same_after_restarts(tmp_path: Path) -> None:
    made = job(optimizer=lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.05)), schedule=KINDS["sequential"])
    whole, parted = trained(made, (), tmp_path / "whole"), trained(made, (), tmp_path / "parted", stops=(3, 8))
    assert torch.equal(whole.weights, parted.weights) and parted.rates == whole.rates and len(set(whole.rates)) > 1


class Endless:
    """Data with a state, that nobody knows the length of: where a round ends is seen when the next begins."""

    def __init__(self, length: int) -> None:
        self.length, self.at = length, 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.length:
            self.at += 1
            yield BATCHES[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Unsized:
    def __iter__(self) -> Iterator[Any]:
        return iter(BATCHES)


@pytest.mark.parametrize(
    "data",
    [lambda: BATCHES, Unsized, lambda: Endless(5), lambda: iter(BATCHES)],
    ids=["list", "unsized", "stateful", "iterator"],
)
def test_per_epoch_it_steps_where_a_round_ends_however_late_that_is_known(data: Any, tmp_path: Path) -> None:
    made = job(data=data, steps=15, epochs=3, schedule=lambda o: PerEpoch(lr.ExponentialLR(o, 0.5)))
    for stops in ((), (4,), (5, 6), (10,)):
        found = trained(made, (), tmp_path / str(len(list(tmp_path.iterdir()))), stops)
        assert found.rates == [0.1] * 5 + [0.05] * 5 + [0.025] * 5, stops


def test_a_plateau_is_waited_for_in_validations(tmp_path: Path) -> None:
    values = [0.5, 0.6, 0.6, 0.6, 0.7, 0.7]

    def made() -> Job:
        found = iter(values)
        return job(
            validate=lambda model: {"f1": next(found)},
            goal="max f1",
            every=2,
            schedule=lambda o: lr.ReduceLROnPlateau(o, "max", 0.1, patience=1),
        )

    whole = trained(made(), (), tmp_path / "whole")
    assert whole.rates == [0.1] * 8 + [0.1 * 0.1] * 4  # the fourth validation is the second in a row that is no better
    parted = trained(made(), (), tmp_path / "parted", stops=(1, 6, 7))
    assert parted.rates == whole.rates and torch.equal(parted.weights, whole.weights)


def hooked(parameters: Any) -> torch.optim.Optimizer:
    optimizer = sgd(parameters)
    scheduler = KINDS["step"](optimizer)
    del optimizer.step  # as if it were not attached
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


def attached(parameters: Any) -> torch.optim.Optimizer:
    optimizer = sgd(parameters)
    optimizer.schedule = KINDS["step"](optimizer)  # type: ignore[attr-defined]
    return optimizer


class Custom(lr.LRScheduler):
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.rule = lambda step: 1.0
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        return [rate * self.rule(self.last_epoch) for rate in self.base_lrs]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"optimizer": hooked}, "hook on its step.*schedule=lambda"),
        ({"optimizer": attached}, "comes with a learning-rate scheduler.*schedule=lambda"),
        ({"schedule": lambda o: None}, "gave None, which is no scheduler"),
        ({"schedule": lambda o: lr.StepLR}, "no scheduler"),
        ({"schedule": lr.StepLR}, "wants 2 arguments \\(optimizer, step_size\\)"),
        ({"schedule": lambda a, b, c: None}, "wants 3 arguments"),
        ({"schedule": Custom}, "can't be saved.*a function in rule"),
        ({"schedule": lr.ReduceLROnPlateau}, "does not validate"),
        ({"schedule": lr.ReduceLROnPlateau, "held_out": lambda: BATCHES, "goal": "max accuracy"}, "give mode='max'"),
        ({"schedule": lambda o: PerEpoch(lr.ReduceLROnPlateau(o)), "held_out": lambda: BATCHES}, "leave PerEpoch out"),
        (
            {"schedule": shoestring.warmup_cosine(), "data": Unsized, "steps": 0, "epochs": 2},
            "nobody does.*steps instead of epochs",
        ),
        ({"schedule": shoestring.warmup_cosine(), "data": Unsized, "steps": 9, "epochs": 2}, "nobody does"),
        ({"schedule": shoestring.warmup_cosine(100)}, "in a run of 12 steps would not end"),
    ],
)
def test_what_would_be_another_schedule_is_refused_with_a_way_out(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(Mistake, match=said):
        list(shoestring.train(job(**wrong)))


@pytest.mark.parametrize("wrong", [{"warmup": -1}, {"warmup": 2.5}, {"floor": 2}])
def test_a_warm_up_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(Mistake, match="warmup_cosine"):
        shoestring.warmup_cosine(**wrong)


def test_warm_up_and_cosine_in_numbers(tmp_path: Path) -> None:
    found = trained(job(schedule=shoestring.warmup_cosine(4, floor=0.5), steps=8), (), tmp_path).rates
    assert found == pytest.approx(
        [0.025, 0.05, 0.075, 0.1, 0.1, 0.05 + 0.05 * (1 + 0.5**0.5) / 2, 0.075, 0.05 + 0.05 * (1 - 0.5**0.5) / 2]
    )
    by_epochs = trained(job(schedule=shoestring.warmup_linear(0.2), steps=0, epochs=2), (), tmp_path / "epochs").rates
    assert by_epochs == pytest.approx([0.05, 0.1, *(0.1 * (1 - way / 8) for way in range(8))])


def test_a_checkpoint_of_another_kind_of_schedule_is_refused(tmp_path: Path) -> None:
    kinds = iter([KINDS["step"], KINDS["linear"]])
    with pytest.raises(Mistake, match="made with the schedule StepLR, and the job's is a LinearLR now"):
        trained(job(schedule=lambda o: PerEpoch(next(kinds)(o))), (), tmp_path, stops=(2,))


def test_the_norm_that_clipping_finds_is_noted(tmp_path: Path) -> None:
    run = trained(job(clip=0.01), (), tmp_path / "clipped").run
    assert isinstance(run.noted.norm, float) and run.noted.take_norm() > 0.01 and run.noted.take_norm() is None  # type: ignore[operator]
    assert trained(job(), (), tmp_path / "not").run.noted.take_norm() is None


def test_a_plateau_that_only_the_first_of_many_workers_sees_is_refused() -> None:
    waiting = job(schedule=lr.ReduceLROnPlateau, held_out=lambda: BATCHES, mesh=on_one_axis(Link(0, 2)))
    with pytest.raises(Mistake, match="give kind='server'"):
        rehearse(waiting, (Asynchronous("hogwild"),))
    rehearse(waiting, (Asynchronous("server"),))


def test_a_few_steps_to_try_something_have_the_rates_of_the_whole_training(tmp_path: Path) -> None:
    for whole in (
        job(schedule=shoestring.warmup_cosine(6), steps=20),
        job(schedule=shoestring.warmup_cosine(6), steps=0, epochs=4),
    ):
        assert trained(first_steps(whole, 3), (), tmp_path).rates == pytest.approx([0.1 / 6, 0.2 / 6, 0.3 / 6])
    assert first_steps(job(epochs=7), 3).steps == 3 and not first_steps(job(epochs=7), 3).epochs
    assert shoestring.verify(job(schedule=shoestring.warmup_cosine(6)), ()) == (True, 0.0)
    (tmp_path / "job.py").write_text(FILE)
    told: list[Stepped] = []
    tried = train_task(tmp_path / "job.py", 3)
    train(tried, lambda event: told.append(event) if isinstance(event, Stepped) else None)
    assert [event.rate for event in told] == pytest.approx([0.001, 0.002, 0.003])


FILE = """
import torch, shoestring
from torch import nn
def job() -> shoestring.Job:
    return shoestring.Job(model=lambda: nn.Linear(3, 2), data=lambda: [(torch.ones(4, 3), torch.tensor([0, 1, 1, 0]))] * 50, epochs=5,
                          optimizer=lambda p: torch.optim.SGD(p, lr=0.1), schedule=shoestring.warmup_linear(100))
"""
