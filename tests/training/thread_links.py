"""Workers as threads of one process, whose links really add up and pass on: as real as processes for everything but random numbers."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from shoestring.core.workers.coordinates import coordinates
from shoestring.core.workers.link import CompletedWork, Link, Sending
from shoestring.core.workers.mesh import Mesh, lines
from tests.waiting import HUNG

T = TypeVar("T")


class Line:
    """What the workers of one line share."""

    def __init__(self, world: int) -> None:
        self.barrier = threading.Barrier(world, timeout=HUNG)
        self.slots: list[Any] = [None] * world
        self.mail: dict[tuple[int, int, int], queue.Queue[tuple[Tensor, threading.Event]]] = defaultdict(
            queue.Queue
        )  # from, to, tag

    def shown(self, rank: int, mine: Any) -> list[Any]:
        """What everybody has, when all are here; nobody changes it before all have taken it."""
        self.slots[rank] = mine
        self.barrier.wait()
        found = list(self.slots)
        self.barrier.wait()
        return found


class ThreadLink(Link):
    imagined = False

    def __init__(self, line: Line, rank: int, world: int) -> None:
        super().__init__(rank, world)
        self.line = line

    def begin_sum(self, tensor: Tensor) -> Sending:
        rows = self.line.shown(self.rank, tensor.detach().clone())
        with torch.no_grad():
            tensor.copy_(sum(rows[1:], rows[0]))
        return CompletedWork()

    def begin_scatter(self, whole: Tensor, part: Tensor) -> Sending:
        rows = self.line.shown(self.rank, whole.detach().clone())
        part.copy_(sum(rows[1:], rows[0]).view(self.world, -1)[self.rank])
        return CompletedWork()

    def begin_exchange(self, outgoing: Tensor, incoming: Tensor) -> Sending:
        rows = self.line.shown(self.rank, outgoing.detach().clone())
        incoming.copy_(torch.cat([one.view(self.world, -1)[self.rank] for one in rows]))
        return CompletedWork()

    def begin_gather(self, part: Tensor, whole: Tensor) -> Sending:
        whole.copy_(torch.cat([one.reshape(-1) for one in self.line.shown(self.rank, part.detach().clone())]))
        return CompletedWork()

    def objects(self, mine: Any) -> list[Any]:
        return self.line.shown(self.rank, mine)

    def begin_send(self, tensor: Tensor, to: int, tag: int = 0) -> Sending:
        taken = threading.Event()
        self.line.mail[self.rank, to, tag].put((tensor.detach().clone(), taken))
        return Taken(self.line, taken)

    def receive(self, tensor: Tensor, source: int | None = None, tag: int = 0) -> int:
        assert source is not None, "threads know whom they wait for"
        while not self.line.barrier.broken:
            with suppress(queue.Empty):
                value, taken = self.line.mail[source, self.rank, tag].get(timeout=0.5)
                taken.set()
                with torch.no_grad():
                    tensor.copy_(value)
                assert tensor.shape == value.shape and tensor.dtype == value.dtype, "both sides know what it is"
                return source
        raise threading.BrokenBarrierError


class Taken:
    """A message that somebody has taken when the wait is over."""

    def __init__(self, line: Line, taken: threading.Event) -> None:
        self.line, self.taken = line, taken

    def wait(self) -> None:
        while not self.taken.wait(0.5):
            if self.line.barrier.broken:
                raise threading.BrokenBarrierError


def in_threads(sizes: Mapping[str, int], work: Callable[[Mesh], T]) -> list[T]:
    """What every worker of a mesh gives."""
    world = prod(sizes.values())
    everybody = Line(world)
    of_axis = {
        axis: {rank: (Line(len(line)), line) for line in lines(sizes, axis) for rank in [line[0]]} for axis in sizes
    }

    def worker(rank: int) -> T:
        torch.set_num_threads(1)
        link = ThreadLink(everybody, rank, world)
        axes: dict[str, Link] = {}
        for axis, size in sizes.items():
            shared, _ = next(found for found in of_axis[axis].values() if rank in found[1])
            axes[axis] = (
                link
                if size == world
                else ThreadLink(shared, coordinates(sizes, rank)[axis], size)
                if size > 1
                else Link()
            )
        try:
            return work(Mesh(link, axes))
        except BaseException:
            everybody.barrier.abort()
            for shared, _ in (found for lines_of in of_axis.values() for found in lines_of.values()):
                shared.barrier.abort()
            raise

    with ThreadPoolExecutor(world) as pool:
        futures = [pool.submit(worker, rank) for rank in range(world)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda one: isinstance(one, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]
