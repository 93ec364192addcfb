"""Worker processes for simulated devices. They are forked from the main process, so they share its job and records
without a copy.

A process that dies is replaced and its chunks are done again: their result follows from the order and the names alone.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shoestring.core.errors import Mistake
from shoestring.data.fetch import bind_to_parent
from shoestring.federated.devices.device_errors import Failure, error_kind
from shoestring.federated.round import Order
from shoestring.federated.simulation.shared_buffer import SharedBuffer

if TYPE_CHECKING:
    from shoestring.federated.simulation.simulated_devices import ChunkResult, DeviceWorker, States

SLACK = 16 << 20  # bytes of a buffer in addition to its rows
ROWS = 4  # rows of memory per device of a chunk: for its update, and for what techniques send and keep
MOST = 512 << 20  # bytes of shared memory for waiting results, over all processes
DEATHS = 3  # how many processes may die at one chunk before we give up


class ChunkSlot(NamedTuple):
    """Shared memory for one chunk: its devices' state on the way to the process, and the result on the way back."""

    given: SharedBuffer
    result: SharedBuffer


@dataclass
class PoolProcess:
    slots: list[ChunkSlot]
    connection: Connection | None = None
    process: Any = None
    waiting: deque[tuple[int, tuple[str, ...]]] = field(
        default_factory=deque
    )  # (slot, chunk) in progress, oldest first


class Pool:
    def __init__(self, worker: DeviceWorker, count: int, chunk: int) -> None:
        row = (worker.parts.layout.size + worker.parts.statistics.size) * 4
        size = chunk * row * ROWS + SLACK
        slots = min(max(2, MOST // (size * count)), 64)
        self.worker, self.board = worker, SharedBuffer(row * ROWS + SLACK)
        self.processes = [
            PoolProcess([ChunkSlot(SharedBuffer(size), SharedBuffer(size)) for _ in range(slots)]) for _ in range(count)
        ]
        for one in self.processes:
            self.start(one)

    def start(self, one: PoolProcess) -> None:
        ours, theirs = multiprocessing.Pipe()
        one.process = multiprocessing.get_context("fork").Process(
            target=serve, args=(self, one, theirs, ours), daemon=True
        )
        one.process.start()
        theirs.close()
        one.connection = ours

    def run_chunks(
        self, order: Order, chunks: Sequence[tuple[str, ...]], states: States
    ) -> Generator[ChunkResult, None, None]:
        """Yield the results of chunks in their order. The main process works on some chunks, too, while it waits for
        others."""
        order_bytes = self.board.pack(order)
        world = len(self.processes) + 1
        ranks = [rank_of(number, world) for number in range(len(chunks))]
        left = [deque(number for number, rank in enumerate(ranks) if rank == own) for own in range(world)]
        copied = [len(mine) > len(one.slots) for one, mine in zip(self.processes, left[1:], strict=True)]
        early: dict[int, ChunkResult] = {}  # results of this process, computed before their turn

        def do_next() -> None:
            number = left[0].popleft()
            early[number] = self.worker.run_chunk(order, chunks[number], states)

        try:
            for one, mine in zip(self.processes, left[1:], strict=True):
                for slot in range(min(len(one.slots), len(mine))):
                    one.waiting.append((slot, chunks[mine.popleft()]))
                    self.send_chunk(one, order_bytes, *one.waiting[-1], states)
            for number, rank in enumerate(ranks):
                if not rank:
                    if number not in early:
                        do_next()
                    yield early.pop(number)
                    continue
                one = self.processes[rank - 1]
                while left[0] and len(early) < len(one.slots) and not self.has_answer(one):
                    do_next()
                slot, found = self.receive(one, order_bytes, states, copied[rank - 1])
                if left[rank]:
                    one.waiting.append((slot, chunks[left[rank].popleft()]))
                    self.send_chunk(one, order_bytes, *one.waiting[-1], states)
                yield found
        finally:
            if any(one.waiting for one in self.processes):  # the caller stopped before the last result
                self.close()
                for one in self.processes:
                    one.waiting.clear()
                    self.start(one)

    def has_answer(self, one: PoolProcess) -> bool:
        """Whether a process has sent a result, or is dead."""
        assert one.connection is not None, "it was started"
        try:
            return one.connection.poll()
        except OSError:
            return True

    def send_chunk(
        self, one: PoolProcess, order_bytes: bytes, slot: int, chunk: tuple[str, ...], states: States
    ) -> None:
        assert one.connection is not None, "it was started"
        needed = {name: states[name] for name in chunk if name in states}
        with suppress(OSError):  # the process is dead: `receive` will notice
            one.connection.send((order_bytes, slot, chunk, one.slots[slot].given.pack(needed)))

    def receive(self, one: PoolProcess, order_bytes: bytes, states: States, copied: bool) -> tuple[int, ChunkResult]:
        """The oldest result in progress at a process. A process that died is replaced and given its chunks again."""
        for _ in range(DEATHS):
            assert one.connection is not None, "it was started"
            slot, chunk = one.waiting[0]
            try:
                data, error = one.connection.recv()
            except (EOFError, OSError):
                one.process.join()
                self.start(one)
                for place, names in one.waiting:
                    self.send_chunk(one, order_bytes, place, names, states)
                continue
            one.waiting.popleft()
            if error:
                raise Mistake(error)
            return slot, copy_from_shared_memory(one.slots[slot].result.unpack(data), copied)
        raise Mistake(
            f"the process that worked for {self.worker.describe(chunk)} died {DEATHS} times: "
            f"it may have run out of memory; give --processes 1"
        )

    def close(self) -> None:
        for one in self.processes:
            if one.connection is not None:
                one.connection.close()
            if one.process is not None:
                one.process.kill()
                one.process.join()


def rank_of(number: int, world: int) -> int:
    """Which process gets a chunk. Chunks are ordered by size, so turns go back and forth to balance the load.

    >>> [rank_of(number, 3) for number in range(8)]
    [0, 1, 2, 2, 1, 0, 0, 1]
    """
    turn, place = divmod(number, world)
    return world - 1 - place if turn % 2 else place


def copy_from_shared_memory(found: ChunkResult, copied: bool) -> ChunkResult:
    """Copy a result out of shared memory: the devices' state always, the updates if their slot is used again in this
    round (`copied`)."""
    states = {name: {key: value.clone() for key, value in state.items()} for name, state in found.states.items()}
    if not copied:
        return replace(found, states=states)
    sent = tuple(one.copy() for one in found.sent)
    return replace(found, sent=sent, states=states)


def serve(pool: Pool, one: PoolProcess, connection: Connection, others: Connection) -> None:
    """The main function of a worker process."""
    bind_to_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    others.close()
    torch.set_num_threads(1)
    while True:
        try:
            order_bytes, slot, chunk, data = connection.recv()
        except (EOFError, OSError):
            os._exit(0)
        order: Order = pool.board.unpack(order_bytes)
        states: States = one.slots[slot].given.unpack(data)
        try:
            connection.send((one.slots[slot].result.pack(pool.worker.run_chunk(order, chunk, states)), ""))
        except Failure as error:
            connection.send((b"", error_kind(error)))
