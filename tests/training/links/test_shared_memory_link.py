"""What neighbours pass through memory comes out as if gloo had carried it; without room it does."""

from __future__ import annotations

import multiprocessing
from datetime import timedelta
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import distributed as dist

from shoestring.core.workers.link import PeerLost
from shoestring.measure.tracker import Tracker
from shoestring.training.links.shared_memory_link import SharedMemoryLink, join_link, slot_size
from tests.waiting import HUNG

COUNTS = (1 << 14, 100_003, 3_000_000)  # numbers: less than a slot, uneven, several rounds of both slots


def draws(count: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1000 * rank + count)
    return (torch.rand(count, generator=draw) * 100).to(dtype)


def worker(rank: int, world: int, folder: str, roomy: bool) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=HUNG)
    )
    if not roomy:
        import shoestring.training.links.shared_memory as module

        module.create_file = lambda size: None
    near, far = join_link(rank, world), join_link(rank, world, same_machine=False)
    assert isinstance(near, SharedMemoryLink) is roomy and near.same_machine is roomy and not far.same_machine
    results = []
    for count, dtype in product(COUNTS, (torch.float32, torch.float64, torch.uint8, torch.bfloat16)):
        count = count // world * world
        mine = [draws(count, other, dtype) for other in range(world)]
        whole, kept, part = (
            mine[rank].clone(),
            torch.empty(count, dtype=dtype),
            torch.empty(count // world, dtype=dtype),
        )
        near.sum(whole).wait()
        near.gather(mine[rank][: len(part)], kept).wait()
        near.scatter(mine[rank], part).wait()
        exact = (
            sum(one.double() for one in mine).to(dtype)
            if dtype != torch.uint8
            else sum(one.int() for one in mine).to(dtype)
        )
        slack = 0.02 if dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(whole, exact, rtol=slack, atol=0.0)
        torch.testing.assert_close(part, exact.view(world, -1)[rank], rtol=slack, atol=0.0)
        assert torch.equal(kept, torch.cat([one[: len(part)] for one in mine]))
        results.append(whole.to(torch.float64).sum().item())
    with Tracker() as tracker:
        told = far.objects(results)
    assert not tracker.log.events, (
        "what talking takes is no memory of a step: gloo's threads let go of it at a time of their own"
    )
    assert len({tuple(one) for one in told}) == 1, "all have the same bits"
    if roomy and rank == 0:  # the other one has no part in it, and never comes
        near.deadline = 0.05
        with pytest.raises(PeerLost, match="worker 1 of"):
            near.sum(torch.ones(1 << 20)).wait()
    Path(folder, f"done-{rank}").touch()
    dist.barrier()


@pytest.mark.parametrize(("world", "roomy"), [(2, True), (3, True), (2, False)])
def test_sums_parts_and_wholes_are_right_whatever_carries_them(world: int, roomy: bool, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=worker, args=(rank, world, str(tmp_path), roomy)) for rank in range(world)]
    for one in workers:
        one.start()
    for one in workers:
        one.join(HUNG)
        one.kill()
    assert sorted(path.name for path in tmp_path.glob("done-*")) == [f"done-{rank}" for rank in range(world)]


@pytest.mark.parametrize("world", [2, 3, 7, 64, 1000])
def test_slots_hold_whole_numbers_of_every_worker(world: int) -> None:
    assert slot_size(world) % (world * np.dtype(np.float64).itemsize) == 0 and slot_size(world) >= 64 * world
