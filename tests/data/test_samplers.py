"""Samplers: each goes on at any position with the batches that it would have had, alone and in a group."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from shoestring import Job
from shoestring.core.errors import Mistake
from shoestring.core.job import Sampler
from shoestring.core.workers.link import Link
from shoestring.core.workers.mesh import imagined_mesh, on_one_axis
from shoestring.data.feed import Feed
from shoestring.data.samplers import Poisson, Shuffled, Subset

ROWS = TensorDataset(torch.arange(20))
SAMPLERS: list[Sampler | None] = [
    None,
    Shuffled(),
    Poisson(0.3),
    Poisson(0.02),
    Subset((1, 3, 5, 7, 9)),
    Subset((2, 4, 8), Poisson(0.5)),
]


def job(sampler: Sampler | None, world: int = 1, rank: int = 0, **more: Any) -> Job:
    return Job(
        **{
            "model": torch.nn.Identity,
            "data": lambda: ROWS,
            "batch": 3,
            "sampler": sampler,
            "mesh": on_one_axis(Link(rank, world)),
        }
        | more
    )


def numbers(batch: Any) -> list[int]:
    found: list[int] = batch[0].tolist()
    return found


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("position", [0, 1, 5, 13])
@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_a_feed_goes_on_with_the_same_samples(sampler: Sampler | None, position: int, world: int) -> None:
    for rank in range(world):
        feed = Feed(job(sampler, world, rank))
        for _ in range(position):
            next(feed)
        state = feed.state_dict()
        rest = [numbers(batch) for batch in islice(feed, 9)]
        again = Feed(job(sampler, world, rank))
        again.load_state_dict(state)
        assert [numbers(batch) for batch in islice(again, 9)] == rest


def test_shuffled_is_the_order_that_runs_on_disk_were_begun_with() -> None:
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0)).tolist()
    for sampler in (None, Shuffled()):
        assert [numbers(batch) for batch in islice(Feed(job(sampler)), 6)] == [
            order[start : start + 3] for start in range(0, 18, 3)
        ]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_the_workers_of_a_group_share_what_one_process_has(sampler: Sampler | None) -> None:
    """All of it, each sample once; who has none of a small batch is idle and counts nothing."""
    alone = Feed(job(sampler))
    feeds = [Feed(job(sampler, 3, rank)) for rank in range(3)]
    for _ in range(12):
        parts = [(numbers(next(feed)), feed.assignment.idle) for feed in feeds]
        assert all(found for found, _ in parts)
        assert [number for found, idle in parts if not idle for number in found] == numbers(next(alone))


def test_poisson_takes_each_sample_with_its_probability() -> None:
    batches = list(islice(Poisson(0.25).batches(200, 0, 0, 0), 400))
    counts = torch.zeros(200)
    for batch in batches:
        assert batch == sorted(set(batch))
        counts[batch] += 1
    deviation = (0.25 * 0.75 / 400) ** 0.5
    assert float((counts / 400 - 0.25).abs().max()) < 5 * deviation
    assert abs(sum(map(len, batches)) / 400 - 50) < 5 * (200 * 0.25 * 0.75 / 400) ** 0.5
    assert len({len(batch) for batch in batches}) > 10, "sizes differ"


def test_poisson_follows_from_the_seed_and_has_no_empty_batch() -> None:
    rare = [list(islice(Poisson(0.001).batches(20, 0, seed, 0), 30)) for seed in (0, 0, 1)]
    assert rare[0] == rare[1] != rare[2] and all(batch for batch in rare[0])


def test_a_subset_has_its_samples_only() -> None:
    seen = {number for batch in islice(Feed(job(Subset((1, 3, 5, 7)))), 20) for number in numbers(batch)}
    assert seen == {1, 3, 5, 7}


def test_batches_are_divided_along_the_data_axis_only() -> None:
    feeds = [Feed(job(None, mesh=imagined_mesh({"data": 3, "stage": 2}, rank))) for rank in range(6)]
    found = [numbers(next(feed)) for feed in feeds]
    assert found[0] == found[1] and found[2] == found[3] and found[4] == found[5]
    assert found[0] + found[2] + found[4] == numbers(next(Feed(job(None))))


@pytest.mark.parametrize(
    ("sampler", "more", "told"),
    [
        (Shuffled(), {"batch": 21}, "a data set of 20 samples for batches of 21"),
        (Subset((1, 2)), {}, "a data set of 2 samples for batches of 3"),
        (Subset((1, 20, 3)), {}, "names sample 20 of a data set of 20"),
        (Shuffled(), {"mesh": on_one_axis(Link(0, 4))}, "batches of 3 samples for 4 workers"),
        (Poisson(0.5), {"data": lambda: [torch.ones(2)]}, "its data are a list"),
    ],
)
def test_what_cant_be_sampled_is_told(sampler: Sampler, more: dict[str, Any], told: str) -> None:
    with pytest.raises(Mistake, match=told):
        next(Feed(job(sampler, **more)))


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.5])
def test_a_rate_that_is_no_probability_is_told(rate: float) -> None:
    with pytest.raises(Mistake, match="above 0 and at most 1"):
        Poisson(rate)
