"""What neighbours send each other through memory arrives as it was sent, in any order, and when there is no room for it."""

from __future__ import annotations

import multiprocessing
from datetime import timedelta
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed as dist

from shoestring.core.errors import Mistake
from shoestring.core.workers.link import PeerLost
from shoestring.training.links import mailbox
from shoestring.training.links.mailbox import Mailbox
from shoestring.training.links.shared_memory_link import join_link
from tests.waiting import HUNG


def message(size: int, value: int) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def both_ends(room: int = 1000) -> tuple[Mailbox, Mailbox]:
    memory = np.zeros(mailbox.TABLE + room, np.uint8)
    return Mailbox(memory), Mailbox(memory)


def taken(box: Mailbox, size: int, tag: int) -> list[int]:
    into = message(size, 0)
    assert box.take(into, tag) == "memory"
    return sorted(set(into.tolist()))


def test_messages_are_told_apart_by_tags_and_the_oldest_of_a_tag_comes_first() -> None:
    sender, receiver = both_ends()
    for tag, value in ((5, 1), (6, 2), (5, 3)):
        assert sender.put(message(100, value), tag) == "memory"
    assert receiver.take(message(100, 0), 7) == ""
    assert [taken(receiver, 100, tag) for tag in (6, 5, 5)] == [[2], [1], [3]]
    assert receiver.take(message(100, 0), 5) == ""


def test_what_finds_no_room_is_left_to_gloo_and_room_is_used_again() -> None:
    sender, receiver = both_ends(1000)
    assert [sender.put(message(400, tag), tag) for tag in (1, 2, 3)] == ["memory", "memory", "gloo"]
    assert receiver.take(message(400, 0), 3) == "gloo" and receiver.take(message(400, 0), 3) == ""
    assert taken(receiver, 400, 1) == [1] and sender.put(message(300, 4), 4) == "memory"  # in the gap
    assert taken(receiver, 400, 2) == [2] and taken(receiver, 300, 4) == [4]
    assert sender.put(message(1000, 5), 5) == "memory" and sender.put(message(0, 0), 6) == "memory"


def test_a_full_table_takes_nothing_and_a_message_of_another_size_is_refused() -> None:
    sender, receiver = both_ends(10)
    assert {sender.put(message(100, 0), tag) for tag in range(1, mailbox.ENTRIES + 1)} == {"gloo"}
    assert (
        sender.put(message(1, 0), 1) == ""
        and receiver.take(message(100, 0), 9) == "gloo"
        and sender.put(message(1, 7), 1) == "memory"
    )
    with pytest.raises(Mistake, match="100 bytes came where 50"):
        receiver.take(message(50, 0), 1)


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(1, 3), st.booleans()), max_size=60))
def test_it_is_a_queue_for_every_tag(moves: list[tuple[int, int, bool]]) -> None:
    sender, receiver = both_ends(700)
    queues: dict[int, list[tuple[int, int, str]]] = {}
    for number, (size, tag, sends) in enumerate(moves):
        queue = queues.setdefault(tag, [])
        if sends:
            queue.append((size, number % 250, sender.put(message(size, number % 250), tag)))
        elif queue:
            size, value, carrier = queue.pop(0)
            into = message(size, value + 1)
            assert receiver.take(into, tag) == carrier
            assert carrier == "gloo" or into.tolist() == [value] * size


def worker(rank: int, world: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=HUNG)
    )
    link = join_link(rank, world)
    link.open_mailboxes()
    draw = Random(1)
    for _ in range(20):  # everybody sends everybody else some messages, and takes them in another order
        sizes = {
            (one, other, tag): draw.choice((1, 1000, 300_000, 3_000_000))
            for one in range(world)
            for other in range(world)
            for tag in range(1, 5)
            if one != other
        }
        sendings = [
            (whole, link.sending(whole, other, tag))
            for (one, other, tag), size in sizes.items()
            if one == rank
            for whole in [torch.full((size,), float(100 * one + 10 * other + tag))]
        ]
        mine = [key for key in sizes if key[1] == rank]
        draw.shuffle(order := sorted(sizes))
        for one, other, tag in [key for key in order if key in mine]:
            into = torch.empty(sizes[one, other, tag])
            assert link.receive(into, one, tag) == one and (into == 100 * one + 10 * other + tag).all()
        for _, sending in sendings:
            sending.wait()
    if rank == 0:
        link.deadline = 0.05
        with pytest.raises(PeerLost, match=f"worker 1 of {world} did not come"):
            link.receive(torch.empty(1), 1, 77)
    Path(folder, f"done-{rank}").touch()
    dist.barrier()


@pytest.mark.parametrize("world", [2, 4])
def test_processes_that_all_send_at_once_never_wait_for_each_other(world: int, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=worker, args=(rank, world, str(tmp_path))) for rank in range(world)]
    for one in workers:
        one.start()
    for one in workers:
        one.join(HUNG)
        one.kill()
    assert sorted(path.name for path in tmp_path.glob("done-*")) == [f"done-{rank}" for rank in range(world)]
