"""The feed: the same batches from any position on, whatever else is drawn."""
from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from shoestring import Job
from shoestring.core import random_state
from shoestring.core.errors import Mistake
from shoestring.data.feed import Feed


class Counting:
    """Data that know their own state; they are never gone through again."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.at += 1
            yield torch.tensor([float(self.at)])

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def drawn() -> Iterator[torch.Tensor]:
    while True:
        yield torch.randn(2) + random.random() + float(np.random.rand())


class Noisy(torch.utils.data.Dataset[torch.Tensor]):
    """A data set that draws for every sample, as augmentation does."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(()) + random.random()


class Drawing(Counting):
    """Data that know their own state and draw, once when gone through and once for every batch."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        torch.rand(1)
        return (number + torch.rand(1) for number in super().__iter__())


ROWS = TensorDataset(torch.arange(10.0))
KINDS: dict[str, Any] = {
    "own state": Counting, "own state that draws": Drawing, "data set": lambda: ROWS, "data set that draws": Noisy,
    "generator that draws": drawn,
    "list": lambda: [torch.tensor([float(n)]) for n in range(30)],
    "shuffling loader": lambda: (batch for _ in range(9) for batch in DataLoader(ROWS, batch_size=3, shuffle=True)),
}


def flat(batch: Any) -> list[float]:
    return (batch[0] if isinstance(batch, (list, tuple)) else batch).tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("position", [0, 1, 4, 11])
def test_a_feed_goes_on_from_any_position(kind: str, position: int) -> None:
    job = Job(model=lambda: torch.nn.Linear(1, 1), data=KINDS[kind], batch=3)
    random_state.seed(0)
    feed = Feed(job)
    seen = []
    for _ in range(position):
        seen.append(flat(next(feed)))
        torch.rand(3), random.random()          # the model draws in between
    state = feed.state_dict()
    rest = [flat(next(feed)) for _ in range(6)]
    random_state.seed(77)
    other = Feed(job)
    other.load_state_dict(state)
    assert [flat(next(other)) for _ in range(6)] == rest


def test_data_and_model_do_not_draw_from_each_other() -> None:
    random_state.seed(0)
    feed = Feed(Job(model=lambda: torch.nn.Linear(1, 1), data=drawn))
    alone = torch.rand(1)
    random_state.seed(0)
    next(feed)
    assert torch.equal(torch.rand(1), alone)


def test_data_that_end_too_early_are_told_of() -> None:
    job = Job(model=lambda: torch.nn.Linear(1, 1), data=lambda: iter([torch.ones(1)] * 3))
    feed = Feed(job)
    with pytest.raises(Mistake, match="end after 3 batches"):
        feed.load_state_dict({"taken": 5, "data": None, "chance": feed.random_stream.state})


def test_a_data_set_is_shuffled_anew_every_time_round() -> None:
    feed = Feed(Job(model=lambda: torch.nn.Linear(1, 1), data=lambda: ROWS, batch=5))
    rounds = [sorted(flat(next(feed)) + flat(next(feed))) for _ in range(3)]
    assert rounds == [list(map(float, range(10)))] * 3


class Ten(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, place: int) -> torch.Tensor:
        return torch.tensor([float(place)])


class Unsized:
    """Can be gone through again, and does not say how many batches it has."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.tensor([float(number)]) for number in range(3)])


def linear(data: Any, **more: Any) -> Job:
    return Job(model=lambda: torch.nn.Linear(1, 1), data=data, **more)


@pytest.mark.parametrize("data", [lambda: [torch.ones(1)] * 3, Unsized, lambda: torch.utils.data.DataLoader(Ten(), batch_size=4)],
                         ids=["list", "unsized", "loader"])
@pytest.mark.parametrize("counted", [False, True])
def test_data_that_can_be_gone_through_again_go_round(data: Any, counted: bool) -> None:
    feed = Feed(linear(data, steps=9, epochs=9 * counted))
    told = [(feed.epoch, feed.epochs) for _ in islice(feed, 7)]
    assert [epoch for epoch, _ in told] == [0, 0, 0, 1, 1, 1, 2]
    if feed.per_epoch or counted:
        assert [over for _, over in told] == [0, 0, 1, 1, 1, 2, 2]
    assert not feed.ended


def test_a_loader_draws_another_order_each_round_and_the_same_when_it_goes_on() -> None:
    job = linear(lambda: torch.utils.data.DataLoader(Ten(), batch_size=5, shuffle=True), steps=20)
    feed = Feed(job)
    rounds = [torch.cat([next(feed) for _ in range(2)]).flatten().tolist() for _ in range(2)]
    assert rounds[0] != rounds[1] and sorted(rounds[0]) == sorted(rounds[1])
    state, ahead = feed.state_dict(), [next(feed) for _ in range(5)]
    again = Feed(job)
    again.load_state_dict(state)
    assert all(torch.equal(next(again), one) for one in ahead) and again.epochs == feed.epochs


@pytest.mark.parametrize("taken", range(1, 8))
def test_a_feed_that_looks_ahead_goes_on_with_the_same_batches(taken: int) -> None:
    class Drawing:
        def __iter__(self) -> Iterator[torch.Tensor]:
            return (torch.rand(2) for _ in range(3))

    job = linear(Drawing, epochs=4)
    feed = Feed(job)
    for _ in range(taken):
        next(feed)
    state, rest = feed.state_dict(), [next(feed) for _ in range(4)]
    again = Feed(job)
    again.load_state_dict(state)
    assert (again.epoch, again.in_round, again.round_over) == tuple(state["round"])
    assert all(torch.equal(next(again), one) for one in rest)


def test_an_iterator_ends_unless_epochs_are_asked_for() -> None:
    feed = Feed(linear(lambda: iter([torch.ones(1)] * 3), steps=5))
    assert len(list(feed)) == 3 and feed.ended
    feed = Feed(linear(lambda: iter([torch.ones(1)] * 3), epochs=2))
    assert len(list(feed)) == 6 and feed.ended and feed.epochs == 2
