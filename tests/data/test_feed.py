"""The feed: the same batches from any position on, whatever else is drawn."""

from __future__ import annotations

import multiprocessing
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from shoestring import Job
from shoestring.core.errors import Mistake
from shoestring.core.running import random_state
from shoestring.core.workers.link import Link
from shoestring.core.workers.mesh import on_one_axis
from shoestring.data.feed import Feed
from tests.waiting import HUNG, until_gone


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
    "own state": Counting,
    "own state that draws": Drawing,
    "data set": lambda: ROWS,
    "data set that draws": Noisy,
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
        torch.rand(3), random.random()  # the model draws in between
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


@pytest.mark.parametrize(
    "data",
    [lambda: [torch.ones(1)] * 3, Unsized, lambda: torch.utils.data.DataLoader(Ten(), batch_size=4)],
    ids=["list", "unsized", "loader"],
)
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


class Augmented:
    """A data set that draws from all three generators; not of torch."""

    def __init__(self, count: int = 10) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> torch.Tensor:
        if not 0 <= place < self.count:
            raise IndexError(place)
        return torch.tensor([place, float(torch.rand(())), np.random.rand(), random.random()], dtype=torch.float64)


def doubled(samples: list[Any]) -> torch.Tensor:
    return torch.stack(samples) * 2


def test_batches_are_the_same_bits_for_any_number_of_workers_and_go_on_from_anywhere() -> None:
    feeds = [
        Feed(linear(Augmented, batch=3, steps=9, workers=workers, collate=lambda samples: torch.stack(samples) * 2))
        for workers in (0, 1, 2)
    ]
    for feed in feeds:
        feed.start()
    found = [[next(feed) for _ in range(7)] for feed in feeds]
    assert all(all(map(torch.equal, found[0], other)) for other in found[1:])
    assert len({float(row[1]) for batch in found[0] for row in batch}) == 21  # every sample draws its own
    again = Feed(feeds[2].job)
    again.start()
    state = Feed(feeds[2].job)
    for _ in range(4):
        next(state)
    again.load_state_dict(state.state_dict())
    assert all(torch.equal(next(again), one) for one in found[0][4:]) and again.epochs == feeds[0].epochs
    assert again.how == "the data set resumes at its position"
    processes = multiprocessing.active_children()
    assert len(processes) == 1 + 2 + 2
    for feed in (*feeds, again):
        feed.close()
    for process in processes:
        process.join(HUNG)
    assert not [process for process in processes if process.is_alive()]


def test_a_group_fetches_its_parts_ahead_and_collates_them_itself() -> None:
    def parts(workers: int) -> list[torch.Tensor]:
        job = linear(Augmented, batch=5, steps=4, workers=workers, collate=doubled)
        feeds = [Feed(replace(job, mesh=on_one_axis(Link(rank, 2)))) for rank in range(2)]
        for feed in feeds:
            feed.start()
        found = [next(feed) for _ in range(3) for feed in feeds]
        for feed in feeds:
            feed.close()
        return found

    ahead, here = parts(1), parts(0)
    assert [len(part) for part in here] == [2, 3] * 3 and all(map(torch.equal, ahead, here))


def test_what_fails_in_a_process_that_fetches_is_told_with_its_line() -> None:
    class Broken(Augmented):
        def __getitem__(self, place: int) -> torch.Tensor:
            raise KeyError("no such picture")

    feed = Feed(linear(Broken, batch=2, workers=1))
    feed.start()
    with pytest.raises(Mistake, match=r"test_feed.py line \d+: KeyError: 'no such picture'"):
        next(feed)
    feed.close()


def test_a_killed_process_leaves_none_that_fetches_behind(tmp_path: Path) -> None:
    program = (
        "import os, signal, multiprocessing; from tests.data.test_feed import *\n"
        "feed = Feed(linear(Augmented, batch=2, steps=9, workers=2)); feed.start(); next(feed)\n"
        "print(*[one.pid for one in multiprocessing.active_children()], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    pids = list(map(int, ended.stdout.split()))
    assert len(pids) == 2 and ended.returncode == -signal.SIGKILL
    for pid in pids:
        until_gone(pid)


class Told:
    """Data that want to know the round, of a length that they state."""

    def __init__(self, said: int, real: int) -> None:
        self.said, self.real, self.rounds = said, real, list[int]()

    def __len__(self) -> int:
        return self.said

    def set_epoch(self, epoch: int) -> None:
        self.rounds.append(epoch)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.full((1,), float(10 * self.rounds[-1] + place)) for place in range(self.real)])


@pytest.mark.parametrize(("said", "real"), [(3, 3), (2, 3), (5, 3)], ids=["right", "too few", "too many"])
@pytest.mark.parametrize("counted", [False, True])
def test_a_length_that_is_wrong_does_not_move_the_epochs(said: int, real: int, counted: bool) -> None:
    data = Told(said, real)
    job = linear(lambda: data, steps=9, epochs=9 * counted)
    feed = Feed(job)
    told = [(float(batch), feed.epoch, feed.epochs) for batch in islice(feed, 8)]
    assert [value for value, _, _ in told] == [0, 1, 2, 10, 11, 12, 20, 21] and data.rounds == [0, 1, 2]
    assert [epoch for _, epoch, _ in told] == [0, 0, 0, 1, 1, 1, 2, 2]
    if counted:
        assert [over for _, _, over in told] == [0, 0, 1, 1, 1, 2, 2, 2]
    data = Told(said, real)
    again = Feed(replace(job, data=lambda: data))
    again.load_state_dict(feed.state_dict())
    assert float(next(again)) == 22 and data.rounds[-1] == 2 and again.epoch == 2


def test_the_sampler_of_a_loader_is_told_the_round() -> None:
    class Turning(torch.utils.data.Sampler[int]):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __len__(self) -> int:
            return 10

        def __iter__(self) -> Iterator[int]:
            return iter([(place + self.epoch) % 10 for place in range(10)])

    feed = Feed(linear(lambda: torch.utils.data.DataLoader(Ten(), batch_size=5, sampler=Turning()), steps=9))
    assert [float(next(feed)[0]) for _ in range(5)] == [0, 5, 1, 6, 2]


@pytest.mark.parametrize("data", [list, tuple])
def test_lists_go_on_at_once(data: Any) -> None:
    class Counted(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            raise AssertionError("it is not gone through")

    batches = (
        Counted(torch.ones(1) * number for number in range(5))
        if data is list
        else tuple(torch.ones(1) * n for n in range(5))
    )
    feed = Feed(linear(lambda: batches, steps=10**9, epochs=10**9))
    feed.load_state_dict({"taken": 5 * 10**8 + 3, "data": None, "chance": feed.random_stream.state})
    assert float(next(feed)) == 3 and (feed.epoch, feed.in_round, feed.round_over) == (10**8, 4, False)
    next(feed)
    assert feed.round_over and feed.epochs == 10**8 + 1


def test_data_that_are_empty_in_the_second_round_end() -> None:
    class Once:
        left = 3

        def __iter__(self) -> Iterator[torch.Tensor]:
            while self.left:
                self.left -= 1
                yield torch.ones(1)

    feed = Feed(linear(Once, steps=9))
    assert len(list(feed)) == 3 and feed.ended and feed.epochs == 1
    assert list(feed) == []


@pytest.mark.parametrize("more", [{"drop_last": True}, {}, {"num_workers": 1, "persistent_workers": True}], ids=str)
def test_loaders_with_a_generator_of_their_own_go_on_with_the_same_batches(more: Any) -> None:
    def data() -> Any:
        return torch.utils.data.DataLoader(
            Ten(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5), **more
        )

    job = linear(data, steps=20)
    feed = Feed(job)
    for _ in range(4):
        next(feed)
    again = Feed(job)
    again.load_state_dict(feed.state_dict())
    assert all(torch.equal(next(feed), next(again)) for _ in range(5))
    assert feed.epochs == again.epochs == 9 // (2 if more.get("drop_last") else 3)


@pytest.mark.parametrize("sized", [False, True])
@pytest.mark.parametrize("taken", range(1, 8))
def test_data_with_a_state_go_round_and_on(sized: bool, taken: int) -> None:
    class Stateful:
        place = 0

        def __iter__(self) -> Iterator[torch.Tensor]:
            while self.place < 3:
                self.place += 1
                yield torch.tensor([float(self.place), float(torch.rand(()))])
            self.place = 0

        def state_dict(self) -> dict[str, int]:
            return {"place": self.place}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.place = state["place"]

    class Sized(Stateful):
        def __len__(self) -> int:
            return 3

    job = linear(Sized if sized else Stateful, epochs=9)
    feed, told = Feed(job), []
    for _ in range(taken):
        told.append((float(next(feed)[0]), feed.epochs))
    assert told == [(1, 0), (2, 0), (3, 1), (1, 1), (2, 1), (3, 2), (1, 2)][:taken]
    state = feed.state_dict()
    again = Feed(job)
    again.load_state_dict(state)
    assert (again.epoch, again.in_round, again.round_over) == (feed.epoch, feed.in_round, feed.round_over)
    assert all(torch.equal(next(feed), next(again)) for _ in range(5)) and feed.epochs == again.epochs


def test_a_held_out_data_set_is_gone_through_once_in_order() -> None:
    feed = Feed(linear(lambda: iter(()), batch=4, epochs=1), data=Ten)
    found = []
    for batch in feed:
        found.append(batch.flatten().tolist())
        if feed.round_over:
            break
    assert found == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_what_a_job_says_of_samples_is_refused_where_there_are_none() -> None:
    for more, data in (({"collate": doubled}, iter([torch.ones(1)])), ({"workers": 2}, [torch.ones(1)])):
        with pytest.raises(Mistake, match="map-style"):
            Feed(linear(lambda data=data: data, **more))


def test_a_list_is_one_of_samples_where_batches_are_collated() -> None:
    feed = Feed(linear(lambda: [1.0, 2.0, 3.0], collate=torch.tensor, batch=2, steps=2))
    assert [len(next(feed)) for _ in range(2)] == [2, 2] and feed.per_epoch == 1
    held = Feed(linear(lambda: [1.0], collate=torch.tensor, batch=2), data=lambda: [1.0, 2.0, 3.0])
    assert [next(held).tolist() for _ in range(2)] == [[1.0, 2.0], [3.0]]


def test_data_sets_by_name_are_told_of() -> None:
    with pytest.raises(Mistake, match="give one of them, such as data=lambda: data\\['train'\\]"):
        Feed(linear(lambda: {"train": Ten(), "test": Ten()}))
