"""Every way to add up gives the right sum, the same bits to all, and sends the bytes that were predicted, worker by worker."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoestring.core.costs.hardware import Hardware, for_group, measured_group
from shoestring.core.files.codec import from_json, to_json
from shoestring.core.workers.link import Link, Sending
from shoestring.core.workers.sum_costs import (
    AllReduceTable,
    Rate,
    Speeds,
    choose_algorithm,
    fit_rates,
    seconds,
    sums_of,
    ways,
)
from shoestring.core.workers.sums import (
    BY_MESSAGES,
    LIBRARY,
    MEMORY,
    NAIVE,
    RING,
    TREE,
    TWO_LEVEL,
    room,
    rounds,
    sent_bytes,
)
from tests.training.members import CONTEXT
from tests.waiting import HUNG

COUNTS = (0, 1, 3, 5, 1001, 70_001)  # numbers: none, fewer than workers, not divisible
LINES: dict[int, list[tuple[int, ...]]] = {
    2: [(2,), (1, 1)],
    3: [(3,), (2, 1), (1, 2)],
    4: [(4,), (2, 2), (3, 1), (1, 1, 2)],
}
CASES = [
    (way, machines)
    for world in LINES
    for machines in LINES[world]
    for way in (*BY_MESSAGES, LIBRARY, MEMORY)
    if machines == (world,) or way == TWO_LEVEL
]


def drawn(count: int, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(count, generator=torch.Generator().manual_seed(1000 * rank + count)) * 100).to(dtype)


# Programs, without processes: every worker's rounds are carried out in turn, as far as what it waits for has been sent


def added_up(way: str, machines: tuple[int, ...], count: int) -> list[Tensor]:
    """What every worker has at the end; fails where they wait for each other for ever."""
    world = sum(machines)
    held = [drawn(count, rank) for rank in range(world)]
    todo = [list(rounds(way, rank, machines, count)) for rank in range(world)]
    begun, got = [False] * world, [0] * world
    post: dict[tuple[int, int], list[Tensor]] = {}
    while any(todo):
        moved = False
        for rank, mine in enumerate(todo):
            if not mine:
                continue
            if not begun[rank]:
                for send in mine[0].sends:
                    post.setdefault((rank, send.to), []).append(held[rank][send.begin : send.end].clone())
                begun[rank] = moved = True
            while got[rank] < len(mine[0].receives) and post.get((mine[0].receives[got[rank]].source, rank)):
                one = mine[0].receives[got[rank]]
                part, into = post[one.source, rank].pop(0), held[rank][one.begin : one.end]
                assert len(part) == len(into), "both ends mean the same part"
                into.copy_(into + part if one.adds else part)
                got[rank], moved = got[rank] + 1, True
            if got[rank] == len(mine[0].receives):
                mine.pop(0)
                begun[rank], got[rank], moved = False, 0, True
        assert moved, "all wait for each other"
    assert not any(post.values()), "all that was sent was received"
    return held


@settings(max_examples=60, deadline=None)
@given(
    way=st.sampled_from(BY_MESSAGES),
    machines=st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple),
    count=st.integers(0, 50),
)
def test_every_program_adds_up_right_and_gives_all_the_same_bits(
    way: str, machines: tuple[int, ...], count: int
) -> None:
    held = added_up(way, machines, count)
    exact = sum((drawn(count, rank).double() for rank in range(len(held))), torch.zeros(count, dtype=torch.float64))
    assert all(torch.equal(one, held[0]) for one in held)
    torch.testing.assert_close(held[0].double(), exact, rtol=1e-5, atol=1e-3)


@given(
    way=st.sampled_from(BY_MESSAGES),
    machines=st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple),
    count=st.integers(0, 99),
)
def test_bytes_are_those_of_the_program(way: str, machines: tuple[int, ...], count: int) -> None:
    for rank in range(sum(machines)):
        made = rounds(way, rank, machines, count)
        assert sent_bytes(way, rank, machines, count, 4) == 4 * sum(
            one.end - one.begin for each in made for one in each.sends
        )
        largest = max((one.end - one.begin for each in made for one in each.receives if one.adds), default=0)
        assert largest <= room(way, rank, machines, count) <= largest + 1


def test_which_ways_give_the_same_bits() -> None:
    ranks = drawn(999, 0) + drawn(999, 1) + drawn(999, 2) + drawn(999, 3)  # in their order, as through memory
    assert torch.equal(added_up(NAIVE, (4,), 999)[0], ranks)
    assert torch.equal(added_up(TREE, (4,), 999)[0], added_up(TWO_LEVEL, (2, 2), 999)[0])
    assert len({added_up(way, (2,), 999)[0].numpy().tobytes() for way in BY_MESSAGES}) == 1, "of two workers, all"
    assert not torch.equal(added_up(RING, (4,), 999)[0], ranks), "else to rounding only"


def drawing(way: str, rank: int, machines: tuple[int, ...], count: int) -> str:
    """Rounds as >to begin-end for a send, <source begin-end for a receive, + where it is added."""
    return " | ".join(
        " ".join(
            [
                *(f">{one.to} {one.begin}-{one.end}" for one in each.sends),
                *(f"<{one.source} {one.begin}-{one.end}{'+' * one.adds}" for one in each.receives),
            ]
        )
        for each in rounds(way, rank, machines, count)
    )


def test_who_sends_what_to_whom() -> None:
    assert drawing(NAIVE, 0, (3,), 6) == "<1 0-6+ <2 0-6+ | >1 0-6 >2 0-6"
    assert drawing(NAIVE, 2, (3,), 6) == ">0 0-6 | <0 0-6"
    assert drawing(TREE, 0, (4,), 6) == "<1 0-6+ | <2 0-6+ | >2 0-6 | >1 0-6"
    assert drawing(TREE, 2, (4,), 6) == "<3 0-6+ | >0 0-6 | <0 0-6 | >3 0-6"
    assert drawing(RING, 1, (3,), 6) == ">2 2-4 <0 0-2+ | >2 0-2 <0 4-6+ | >2 4-6 <0 2-4 | >2 2-4 <0 0-2"
    assert drawing(TWO_LEVEL, 3, (2, 2), 8) == ">2 0-4 <2 4-8+ | >1 6-8 <1 4-6+ | >1 4-6 <1 6-8 | >2 4-8 <2 0-4"
    assert drawing(TWO_LEVEL, 1, (2, 1), 6) == ">0 0-6 | <0 0-6", (
        "the smaller machine has one worker, so there is one part"
    )


# What it takes


def test_bytes_of_every_worker_by_hand() -> None:
    assert [sent_bytes(NAIVE, rank, (4,), 10, 4) for rank in range(4)] == [120, 40, 40, 40]
    assert [sent_bytes(TREE, rank, (4,), 10, 4) for rank in range(4)] == [80, 40, 80, 40]
    assert [sent_bytes(RING, rank, (4,), 10, 4) for rank in range(4)] == [60, 60, 60, 60], (
        "parts of 2, 3, 2, 3: all but two that lie together"
    )
    assert [sent_bytes(RING, rank, (3,), 4, 4) for rank in range(3)] == [20, 20, 24], "parts of 1, 1, 2"
    assert [sent_bytes(TWO_LEVEL, rank, (2, 2), 8, 1) for rank in range(4)] == [12] * 4, (
        "half, half of a half and back, and half again"
    )
    assert [sent_bytes(TWO_LEVEL, rank, (2, 1), 6, 1) for rank in range(3)] == [12, 6, 6]
    assert sent_bytes(LIBRARY, 0, (4,), 10, 4) == sent_bytes(MEMORY, 3, (4,), 10, 4) == 60


def test_seconds_by_hand() -> None:
    flat = Speeds(inside=Rate(1e-9, 1e-5), adding=1e-10)
    assert seconds(NAIVE, 1000, (4,), flat) == pytest.approx(6 * (1e-5 + 1e-6) + 3 * 1e-7)
    assert seconds(TREE, 1000, (4,), flat) == pytest.approx(4 * (1e-5 + 1e-6) + 2 * 1e-7)
    assert seconds(TREE, 1000, (3,), flat) == pytest.approx(4 * (1e-5 + 1e-6) + 2 * 1e-7)
    assert seconds(RING, 1000, (4,), flat) == pytest.approx(6 * 1e-5 + 1.5e-6 + 0.75e-7)
    two = Speeds(here=2, inside=Rate(1e-9, 1e-5), between=Rate(1e-8, 1e-4))
    assert seconds(RING, 1000, (2, 2), two) == pytest.approx(6e-4 + 1.5e-5)
    assert seconds(TREE, 1000, (2, 2), two) == pytest.approx(2 * (1e-5 + 1e-6) + 2 * (1e-4 + 1e-5))
    assert seconds(NAIVE, 1000, (2, 2), two) == pytest.approx(2 * (1e-5 + 1e-6) + 4 * (1e-4 + 1e-5))
    assert seconds(TWO_LEVEL, 1000, (2, 2), two) == pytest.approx(2 * (1e-5 + 0.5e-6) + 2e-4 + 1e-5)
    assert seconds(LIBRARY, 1000, (4,), flat) == pytest.approx(4e-5 + 1.5e-6)
    assert all(seconds(way, 1000, (1,), two) == 0 for way in BY_MESSAGES)


@pytest.mark.parametrize("way", [*BY_MESSAGES, LIBRARY, MEMORY])
def test_what_was_timed_is_predicted(way: str) -> None:
    machines = (2, 2) if way == TWO_LEVEL else (4,)
    timed = [(1000, 3e-4), (10**5, 2e-4), (10**6, 7e-3), (10**7, 5e-2)]  # the second in a luckier moment than the first
    speeds = Speeds(2 if way == TWO_LEVEL else 0, measured={way: fit_rates(way, machines, timed)})
    assert [seconds(way, size, machines, speeds) for size, _ in timed] == pytest.approx([3e-4, 3e-4, 7e-3, 5e-2])
    assert seconds(way, 19 * 10**6, machines, speeds) == pytest.approx(9.3e-2), "the last line goes on"


def test_a_tree_for_little_a_ring_for_much_and_two_levels_between_machines() -> None:
    flat = Speeds(inside=Rate(1e-9, 1e-5))
    assert choose_algorithm(100, (8,), flat) == TREE and choose_algorithm(1 << 24, (8,), flat) == RING
    assert (
        choose_algorithm(1 << 24, (8,), Speeds(inside=Rate(1e-9, 1e-5), measured={MEMORY: (Rate(1e-10, 1e-6),)}))
        == MEMORY
    )
    slow = Speeds(8, Rate(4e-12, 1e-5), Rate(4e-11, 3e-5))
    assert choose_algorithm(1 << 24, slow.machines(range(32)), slow) == TWO_LEVEL
    assert choose_algorithm(1 << 24, (8, 8), Speeds(8, only=LIBRARY)) == LIBRARY
    assert TWO_LEVEL not in ways((8,), slow) and MEMORY not in ways((4, 4), Speeds(4, measured={MEMORY: (Rate(),)}))


def test_another_way_than_the_usual_one_must_be_worth_it() -> None:
    measured = {
        LIBRARY: (Rate(1e-9, 1e-5),),
        RING: (Rate(0.97e-9, 0.97e-5),),
        TREE: (Rate(1e-9, 1e-4),),
        NAIVE: (Rate(1e-9, 1e-4),),
    }
    assert choose_algorithm(1 << 20, (4,), Speeds(measured=measured)) == LIBRARY
    assert choose_algorithm(1 << 20, (4,), Speeds(measured={**measured, RING: (Rate(0.5e-9, 0.5e-5),)})) == RING


def test_ways_that_were_measured_on_a_busy_machine_are_not_compared() -> None:
    ways = {MEMORY: (Rate(1e-9, 1e-4, 1 << 20), Rate(2e-9, 1e-4, 1 << 24)), NAIVE: (Rate(1e-12, 1e-9, 1 << 24),)}
    quiet, busy = (
        for_group(measured_group(Hardware(), "4 near", 4, ways, 7.0, busy), "4 near", 4, 4) for busy in (False, True)
    )
    assert (
        quiet.speeds is not None
        and quiet.speeds.measured == ways
        and choose_algorithm(1 << 24, (4,), quiet.speeds) == NAIVE
    )
    assert busy.speeds is not None and str(sums_of(busy.speeds, range(4))) == "sums of 4 workers: shared memory"
    assert busy.links["4"][2] == 7.0 and busy.links["4"][0] == pytest.approx(2e-9)
    assert from_json(Speeds, json.loads(json.dumps(to_json(quiet.speeds)))) == quiet.speeds


def test_a_plan_says_how_sums_are_done() -> None:
    sums = sums_of(Speeds(inside=Rate(1e-9, 1e-5)), range(8))
    assert str(sums) == "sums of 8 workers: tree up to 16.0 KiB, ring above"
    assert [sums.way(size) for size in (0, 8, 1 << 14, 1 + (1 << 14), 1 << 60)] == [TREE, TREE, TREE, RING, RING]
    assert (
        str(AllReduceTable((4,))) == ""
        and AllReduceTable((4,)).alike
        and not sums.alike
        and sums_of(None, range(4)) == AllReduceTable((4,))
    )


@given(world=st.integers(2, 12), here=st.integers(0, 5), size=st.integers(0, 1 << 30))
def test_the_table_says_what_is_chosen_for_the_next_size(world: int, here: int, size: int) -> None:
    speeds = Speeds(here, Rate(1e-9, 1e-5), Rate(1e-8, 1e-4), 1e-10)
    after = max(8, 1 << (size - 1).bit_length() if size else 8)
    assert sums_of(speeds, range(world)).way(size) == choose_algorithm(after, speeds.machines(range(world)), speeds)


def test_a_line_of_a_mesh_knows_which_of_its_workers_share_a_machine() -> None:
    speeds = Speeds(here=4)
    assert (
        speeds.machines([0, 1, 2, 3]) == (4,)
        and speeds.machines([0, 2, 4, 6]) == (2, 2)
        and speeds.machines([1, 5]) == (1, 1)
    )
    assert speeds.machines(range(6)) == (4, 2) and Speeds().machines(range(6)) == (6,)


def test_an_imagined_link_counts_and_takes_room_as_a_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(2, 4, speeds=Speeds(inside=Rate(1e-9, 1e-5)))
    taken: list[int] = []
    real: Callable[[Link, Tensor], Tensor] = Link.room_to_add
    monkeypatch.setattr(
        Link, "room_to_add", lambda self, tensor: taken.append(len(found := real(self, tensor))) or found
    )
    small, large = torch.ones(10), torch.ones(1 << 22)
    first, second = link.sum(small), link.sum(large)
    assert link.sent == 80 + (1 << 24) * 3 // 2 and not taken, "nothing is received before somebody waits"
    second.wait()
    first.wait()
    assert taken == [10, 1 << 20] and small.eq(1).all() and large.eq(1).all()


# Real processes


def worker(rank: int, store: str, place: str) -> None:
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=4, timeout=timedelta(seconds=HUNG)
    )
    try:
        found: dict[str, Any] = {}
        for world in LINES:
            group = distributed.new_group(list(range(world)))
            if rank < world:
                found |= tried(rank, world, group)
        Path(place, f"result-{rank}").write_text(json.dumps(found))
        distributed.barrier()
        lonely(rank)
        Path(place, f"done-{rank}").touch()
    except Exception:
        Path(place, f"error-{rank}").write_text(traceback.format_exc())


def tried(rank: int, world: int, group: Any) -> dict[str, Any]:
    """Every way and count among some workers: digests of the sums, bytes counted and bytes that were really passed on."""
    from shoestring.training.links.link_speed import time_sums
    from shoestring.training.links.shared_memory_link import SharedMemoryLink, join_link

    link: Any = join_link(rank, world, deadline=HUNG, group=group)
    assert isinstance(link, SharedMemoryLink)
    passed: list[int] = []
    begin: Callable[[Tensor, int], Sending] = link.begin_part
    link.begin_part = lambda part, to: passed.append(part.nbytes) or begin(part, to)
    found = {}
    for (way, machines), count, dtype in product(CASES, COUNTS, (torch.float32, torch.uint8, torch.bfloat16)):
        if sum(machines) != world or (dtype != torch.float32 and count not in (3, 1001)):
            continue
        tensor = drawn(count, rank, dtype)
        link.sums = AllReduceTable(machines, ((1, way),))
        before = link.sent
        passed.clear()
        link.sum(tensor).wait()
        exact = sum(
            (drawn(count, other, dtype).double() for other in range(world)), torch.zeros(count, dtype=torch.float64)
        )
        if dtype != torch.uint8:
            slack = 1e-4 if dtype == torch.float32 else 4.0
            torch.testing.assert_close(
                tensor.double(), exact, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=slack
            )
        else:
            assert torch.equal(tensor.double(), exact % 256)
        assert link.sent - before == sent_bytes(way, rank, machines, count, tensor.itemsize)
        assert way not in BY_MESSAGES or sum(passed) == link.sent - before, "what was counted is what was passed on"
        found[f"{way} {machines} {count} {dtype}"] = (
            tensor.view(torch.uint8).numpy().tobytes().hex()[:4000] if count < 1001 else float(tensor.double().sum())
        )
    link.sums = usual = AllReduceTable((world,))
    spent = time_sums(link, {RING: (world,), MEMORY: (world,)}, {64: torch.ones(16)}, {64: 2}, count=2)
    assert set(spent) == {(RING, 64), (MEMORY, 64)} and min(spent.values()) > 0 and link.sums is usual
    assert len(set(link.objects(str(spent)))) == 1, "all workers choose by the same figures"
    # What is begun is done in its order, whatever is waited for
    link.sums = AllReduceTable((world,), ((64, TREE), (1024, MEMORY), (4096, LIBRARY), (1 << 20, RING)))
    several = [torch.full((size,), float(rank)) for size in (4, 200, 900, 5000, 8)]
    sendings = [link.sum(one) for one in several]
    sendings[2 if rank % 2 else 4].wait()
    for sending in sendings:
        sending.wait()
    assert all(one.eq(world * (world - 1) / 2).all() for one in several)
    return found


def lonely(rank: int) -> None:
    """One worker adds up, and the others never come."""
    from torch import distributed

    from shoestring.core.workers.link import PeerLost
    from shoestring.training.links.shared_memory_link import join_link

    group = distributed.new_group([0, 1, 2, 3], timeout=timedelta(seconds=HUNG))
    distributed.barrier()  # who is connected to all may leave only when all are
    distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)  # connecting may take its time
    link: Any = join_link(rank, 4, same_machine=False, group=group)
    link.sums = AllReduceTable((4,), ((1, RING),))
    if rank == 0:
        with pytest.raises(PeerLost):
            link.sum(torch.ones(1 << 20)).wait()


def test_every_way_adds_up_between_real_processes(tmp_path: Path) -> None:
    processes = [CONTEXT.Process(target=worker, args=(rank, f"{tmp_path}/store", str(tmp_path))) for rank in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(HUNG)
        process.kill()
    errors = sorted(tmp_path.glob("error-*"))
    assert not errors, errors[0].read_text()
    results = [json.loads((tmp_path / f"result-{rank}").read_text()) for rank in range(4)]
    for found in results[1:]:
        assert found and all(bits == results[0][case] for case, bits in found.items()), "all have the same bits"
    assert sorted(path.name for path in tmp_path.glob("done-*")) == [f"done-{rank}" for rank in range(4)]
