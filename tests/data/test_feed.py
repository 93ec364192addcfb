"""The feed: the same batches from any position on, whatever else is drawn."""
from __future__ import annotations

import random
from collections.abc import Iterator
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
    job = Job(model=lambda: torch.nn.Linear(1, 1), data=lambda: [torch.ones(1)] * 3)
    feed = Feed(job)
    with pytest.raises(Mistake, match="end after 3 batches"):
        feed.load_state_dict({"taken": 5, "data": None, "chance": feed.random_stream.state})


def test_a_data_set_is_shuffled_anew_every_time_round() -> None:
    feed = Feed(Job(model=lambda: torch.nn.Linear(1, 1), data=lambda: ROWS, batch=5))
    rounds = [sorted(flat(next(feed)) + flat(next(feed))) for _ in range(3)]
    assert rounds == [list(map(float, range(10)))] * 3
