"""The shared-memory link: workers of one machine exchange numbers through shared memory; gloo carries the rest.

    a chunk     every worker writes its numbers to its slot  |  barrier  |  every worker reads what it needs from all slots

Two rows of slots alternate: when all workers have written the next chunk, all have read the last one. Each number is
summed by one worker, in the order of ranks, so all have the same bits. Gloo would copy every byte into the kernel and
out again, on cores that also compute: decisions/011.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_char
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from shoestring.core.workers.link import CompletedWork, DeadlinePassed, Link, Sending
from shoestring.core.workers.sum_costs import Speeds
from shoestring.core.workers.sums import MEMORY
from shoestring.training.links import mailbox
from shoestring.training.links.mailbox import Mailbox
from shoestring.training.links.process_link import ProcessLink
from shoestring.training.links.shared_memory import offer_file

SLOT = 2 << 20  # bytes, approximately; all slots together should fit into a cache
LINE = 64  # bytes of a cache line: no two workers write to the same one
LOOKS, OFFERS, PAUSE = (
    20,
    1000,
    1e-4,
)  # polls without yielding; polls that yield the core; then seconds of sleep between polls
KINDS: dict[torch.dtype, Any] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.int64: np.int64,
    torch.uint8: np.uint8,
}

Numbers = np.ndarray[Any, Any]
T = TypeVar("T")


class SharedMemoryLink(ProcessLink):
    """This process's link among workers that share memory."""

    def __init__(
        self,
        rank: int,
        world: int,
        deadline: float,
        memory: Numbers,
        group: dist.ProcessGroup | None = None,
        speeds: Speeds | None = None,
        line: Sequence[int] = (),
    ) -> None:
        super().__init__(rank, world, same_machine=True, deadline=deadline, group=group, speeds=speeds, line=line)
        self.ticks = memory[: LINE * world].view(np.int64)[
            :: LINE // 8
        ]  # per worker, the number of barriers it has reached
        self.slots = memory[LINE * world :].reshape(2, world, -1)
        self.turn = 0
        self.boxes: list[list[Mailbox]] = []  # per worker, to the next and to the previous one

    def open_mailboxes(self) -> None:
        memory = memory_of_all(self, 2 * self.world * mailbox.BYTES) if not self.boxes else None
        if memory is not None:
            self.boxes = [[Mailbox(box) for box in pair] for pair in memory.reshape(self.world, 2, -1)]

    def box(self, sender: int, receiver: int) -> Mailbox | None:
        """The mailbox between two neighbours; the last worker's next is the first."""
        way = (receiver - sender) % self.world
        return self.boxes[sender][0 if way == 1 else 1] if self.boxes and way in (1, self.world - 1) else None

    def begin_send(self, tensor: Tensor, to: int, tag: int = 0) -> Sending:
        box = self.box(self.rank, to) if tag and tensor.device.type == "cpu" else None
        carrier = self.when(lambda: box.put(tensor, tag), lambda: to) if box is not None else "gloo"
        return CompletedWork() if carrier == "memory" else super().begin_send(tensor, to, tag)

    def receive(self, tensor: Tensor, source: int | None = None, tag: int = 0) -> int:
        box = self.box(source, self.rank) if tag and source is not None and tensor.device.type == "cpu" else None
        if (
            box is not None
            and source is not None
            and self.when(lambda: box.take(tensor, tag), lambda: source) == "memory"
        ):
            return source
        return super().receive(tensor, source, tag)

    def begin_sum(self, tensor: Tensor) -> Sending:
        return self.later(self.add_up, tensor) if self.way(tensor) == MEMORY else super().begin_sum(tensor)

    def begin_scatter(self, whole: Tensor, part: Tensor) -> Sending:
        return (
            self.later(self.add_up_parts, whole, part) if self.in_memory(whole) else super().begin_scatter(whole, part)
        )

    def begin_gather(self, part: Tensor, whole: Tensor) -> Sending:
        return (
            self.later(self.put_together, part, whole) if self.in_memory(whole) else super().begin_gather(part, whole)
        )

    def add_up(self, tensor: Tensor) -> None:
        for chunk in chunks(numbers(tensor), self.slots.shape[-1]):
            slots = self.show_to_all(chunk)
            bounds = [len(chunk) * rank // self.world for rank in range(self.world + 1)]
            parts = [slice(*pair) for pair in pairwise(bounds)]
            own = parts[self.rank]
            total([slot[own] for slot in slots], chunk[own])
            slots[self.rank][own] = chunk[own]
            self.wait_for_all()
            for rank, part in enumerate(parts):
                if rank != self.rank:
                    chunk[part] = slots[rank][part]

    def add_up_parts(self, whole: Tensor, part: Tensor) -> None:
        begin = 0
        rows = numbers(whole).reshape(self.world, -1)
        for chunk in chunks(numbers(part), self.slots.shape[-1] // self.world):
            slots = self.show_to_all(rows[:, begin : begin + len(chunk)])
            total([slot[self.rank] for slot in slots], chunk)
            begin += len(chunk)

    def put_together(self, part: Tensor, whole: Tensor) -> None:
        begin = 0
        rows = numbers(whole).reshape(self.world, -1)
        for chunk in chunks(numbers(part), self.slots.shape[-1]):
            for row, slot in zip(rows, self.show_to_all(chunk), strict=True):
                row[begin : begin + len(chunk)] = slot
            begin += len(chunk)

    def show_to_all(self, mine: Numbers) -> list[Numbers]:
        """Every worker's numbers, after the barrier; each slot has the shape of this worker's numbers."""
        self.turn = 1 - self.turn
        slots = [slot[: mine.nbytes].view(mine.dtype).reshape(mine.shape) for slot in self.slots[self.turn]]
        slots[self.rank][...] = mine
        self.wait_for_all()
        return slots

    def wait_for_all(self) -> None:
        """A barrier."""
        self.ticks[self.rank] += 1
        now = self.ticks[self.rank]
        self.when(lambda: not (self.ticks < now).any(), lambda: int(self.ticks.argmin()))

    def when(self, there: Callable[[], T], who: Callable[[], int]) -> T:
        """Poll until `there` returns something; `who` names the worker that is waited for."""
        looks, until = 0, time.monotonic() + self.deadline
        while not (found := there()):
            looks += 1
            if looks > OFFERS:
                time.sleep(PAUSE)
            elif looks > LOOKS:  # the awaited worker may need this very core, so yield it
                os.sched_yield()
            if time.monotonic() > until:
                raise DeadlinePassed(f"worker {who()} of {self.world} did not come within {self.deadline:.0f} s")
        return found


def chunks(flat: Numbers, size: int) -> Iterator[Numbers]:
    """Parts of `size` bytes, and the remainder."""
    count = size // flat.itemsize
    return (flat[begin : begin + count] for begin in range(0, len(flat), count))


def total(parts: list[Numbers], into: Numbers) -> None:
    """The sum of the parts, in their order."""
    with np.errstate(all="ignore"):  # non-finite numbers are handled elsewhere
        np.add(parts[0], parts[1], out=into)
        for part in parts[2:]:
            np.add(into, part, out=into)


def numbers(tensor: Tensor) -> Numbers:
    """The tensor's own memory as an array. `Tensor.numpy` would make its storage non-resizable."""
    return np.frombuffer(memoryview((c_char * tensor.nbytes).from_address(tensor.data_ptr())), KINDS[tensor.dtype])


def slot_size(world: int) -> int:
    """Bytes of a slot: a multiple of every item size, also when divided by the workers."""
    return max(SLOT // (LINE * world), 1) * LINE * world


def join_link(
    rank: int,
    world: int,
    same_machine: bool = True,
    deadline: float = 300.0,
    group: dist.ProcessGroup | None = None,
    speeds: Speeds | None = None,
    line: Sequence[int] = (),
) -> ProcessLink:
    """This process's link, over an existing process group; `same_machine`: whether all workers are on one. Without room
    in shared memory, gloo carries everything."""
    link = ProcessLink(rank, world, deadline=deadline, group=group, speeds=speeds, line=line)
    if not Link(rank, world, same_machine).same_machine or world == 1:
        return link
    memory = memory_of_all(link, LINE * world + 2 * world * slot_size(world))
    return SharedMemoryLink(rank, world, deadline, memory, group, speeds, line) if memory is not None else link


def memory_of_all(link: ProcessLink, size: int) -> Numbers | None:
    """`size` zeroed bytes that all workers of a link share; None without room. All workers must call it."""
    with offer_file(link, size) as path:
        seen = link.objects(bool(path) and os.path.exists(path))
        memory = np.memmap(path, np.uint8, "r+", shape=(size,)) if all(seen) else None
        link.objects("all have it")
    return memory
