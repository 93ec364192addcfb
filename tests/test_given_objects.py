"""What a user gives to a Job is called, and never hashed, compared or asked whether it is true. Data may be given as objects."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import shoestring
from shoestring import Job, Mistake
from shoestring.data.feed import Feed
from shoestring.data.samplers import Shuffled
from shoestring.federated.devices.local_steps import job_for_devices
from shoestring.training.memory.accumulate import Accumulate


class Untouchable:
    """Refuses what a dictionary, an `in` or an `if` would ask of it."""

    def __eq__(self, other: object) -> bool:
        raise TypeError("it was compared")

    def __hash__(self) -> int:
        raise TypeError("unhashable type")

    def __bool__(self) -> bool:
        raise TypeError("it was asked whether it is true")


class Called(Untouchable):
    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, *given: Any) -> Any:
        return self.function(*given)


class Data(Untouchable):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> Any:
        return torch.full((8,), float(number)), number % 3


class Order(Untouchable, Shuffled):
    pass


def put_together(samples: list[Any]) -> Any:
    return torch.stack([one for one, _ in samples]), torch.tensor([label for _, label in samples])


def untouchable(**more: Any) -> Job:
    functions: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)),
        "data": Data,
        "held_out": Data,
        "loss": lambda output, batch: nn.functional.cross_entropy(output, batch[1]),
        "forward": lambda model, batch: model(batch[0]),
        "weight": lambda batch: len(batch[0]),
        "collate": put_together,
        "show": lambda model: "shown",
        "split": lambda batch, pieces: list(zip(*(one.chunk(pieces) for one in batch), strict=True)),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "schedule": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "metrics": lambda output, batch: {"accuracy": (output.argmax(1) == batch[1]).float().mean()},
        "largest": lambda: put_together([Data()[number] for number in range(4)]),
    }
    return Job(
        **{name: Called(function) for name, function in functions.items()}, sampler=Order(), batch=4, steps=4, **more
    )


def test_objects_that_can_not_be_hashed_or_compared_are_planned_and_trained(tmp_path: Path) -> None:
    job = untouchable()
    outcome = shoestring.plan(job, use=[Accumulate(pieces=2)])
    steps = list(shoestring.train(job, outcome, run=tmp_path / "run"))
    assert [one.number for one in steps] == [1, 2, 3, 4]
    assert set(steps[-1].metrics) == {"accuracy", "loss"}


def test_held_out_samples_in_a_list_leave_the_collate_function_untouched() -> None:
    samples = [Data()[number] for number in range(8)]
    job = replace(untouchable(), data=samples, held_out=samples)
    assert "loss" in list(shoestring.train(job, shoestring.plan(job, use=[])))[-1].metrics


def test_the_job_s_own_validation_and_data_as_objects_are_not_touched_either() -> None:
    own = replace(
        untouchable(),
        held_out=None,
        metrics=None,
        validate=Called(lambda model: {"good": 1.0}),
        goal="max good",
        data=Data(),
    )
    assert list(shoestring.train(own, shoestring.plan(own, use=[])))[-1].metrics == {"good": 1.0}


def test_a_federation_does_not_touch_them_either() -> None:
    records = {f"device {number}": [Data()[sample] for sample in range(number, number + 4)] for number in range(4)}
    job = replace(
        untouchable(clients=Called(lambda: records), group=Called(lambda name: "all")),
        split=None,
        sampler=None,
        largest=None,
    )
    assert len(shoestring.federate(job, rounds=2, per_round=2, processes=1, use=[]).losses) == 2


BATCHES = [(torch.full((2, 8), float(number)), torch.tensor([0, 1])) for number in range(6)]
SET = TensorDataset(torch.arange(24.0).reshape(12, 2).repeat(1, 4), torch.arange(12) % 3)


class Counting(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> Any:
        return SET[number]

    def __call__(self) -> None:
        raise AssertionError("a data set that can be called is no factory")


class Stateful:
    """Batches with a position that stays where it was left."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < len(BATCHES):
            self.at += 1
            yield BATCHES[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def made(data: Any, **more: Any) -> Job:
    return Job(
        **{
            "model": lambda: nn.Linear(8, 3),
            "data": data,
            "optimizer": lambda own: torch.optim.SGD(own, lr=1e-3),
            "batch": 4,
            "steps": 7,
            "every": 2,
        }
        | more
    )


def shuffled() -> DataLoader[Any]:
    return DataLoader(SET, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3))


KINDS: dict[str, Any] = {
    "list": lambda: BATCHES,
    "tuple": lambda: tuple(BATCHES),
    "data set": lambda: SET,
    "callable": Counting,
    "loader": lambda: DataLoader(SET, batch_size=4, shuffle=True),
    "own generator": shuffled,
    "stateful": Stateful,
}


@pytest.mark.parametrize("kind", KINDS)
def test_given_data_are_trained_on_as_those_of_a_factory(kind: str, tmp_path: Path) -> None:
    def weights(job: Job, run: Path, stop: int = 99) -> dict[str, Any]:
        model = nn.Linear(8, 3)
        with torch.no_grad():
            for one in model.parameters():
                one.fill_(0.1)
        for step in shoestring.train(job, shoestring.plan(job, use=[], model=model), model, run=run, save_every=1):
            if step.number == stop:
                break
        return model.state_dict()

    make = KINDS[kind]
    expected = weights(made(make, held_out=make), tmp_path / "made")
    data = make()
    whole = weights(made(data, held_out=data if kind != "stateful" else make), tmp_path / "given")
    assert all(torch.equal(value, whole[name]) for name, value in expected.items())
    weights(made(make(), held_out=make()), tmp_path / "stopped", stop=3)  # another process has another object
    resumed = weights(made(make(), held_out=make()), tmp_path / "stopped")
    assert all(torch.equal(value, resumed[name]) for name, value in expected.items())


class Moving:
    """Gives other batches every time, and can't say where it stands."""

    def __init__(self) -> None:
        self.rounds = 0

    def __iter__(self) -> Iterator[Any]:
        self.rounds += 1
        return iter([(x + self.rounds, y) for x, y in BATCHES])


@pytest.mark.parametrize("name", ["data", "held_out"])
@pytest.mark.parametrize(
    ("value", "said"),
    [
        (iter(BATCHES), "iterator, which can be read only once.*=lambda: ..."),
        ((one for one in BATCHES), "generator, an iterator"),
        ("batches.pt", "str: give batches"),
        (3, "int: give batches"),
    ],
)
def test_what_is_no_data_or_can_not_be_gone_through_again_is_refused_when_the_job_is_made(
    name: str, value: Any, said: str
) -> None:
    with pytest.raises(Mistake, match=f"{name} in the Job is a .*{said}"):
        made(**{"data": BATCHES, name: value})


def test_given_data_that_differ_from_round_to_round_are_refused_before_planning() -> None:
    with pytest.raises(Mistake, match="data in the Job is a Moving that gives other batches when it is read again"):
        shoestring.plan(made(Moving()), use=[])
    assert Feed(made(Moving)).steps_in_all == 7  # a function that makes it is fine


def test_a_schedule_of_devices_is_not_asked_whether_it_is_true() -> None:
    own, of_job = Called(None), Called(None)
    made = Job(model=Called(None), data=list, schedule=of_job)
    assert job_for_devices(made).local.schedule is of_job
    assert job_for_devices(replace(made, local=replace(made.local, schedule=own))).local.schedule is own
