"""Processes that work for simulated devices: forked from the first one, so they have its job and its clients' records without a copy.

One that dies is replaced, and what it was doing is done again: work follows from the order and the names alone.
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
from shoestring.federated.device_errors import kind_of
from shoestring.federated.round import Order
from shoestring.federated.simulation.parcel import SharedBuffer

if TYPE_CHECKING:
    from shoestring.federated.simulation.simulate import ChunkResult, States, Workshop

SLACK = 16 << 20  # bytes of a buffer beside rows
ROWS = 4  # times the row of every device of a chunk: its update, and what techniques send and keep
MOST = 512 << 20  # bytes of results that wait in shared memory, of all processes
DEATHS = 3  # of processes at one chunk, before we say that it can't be done


class ChunkSlot(NamedTuple):
    """Memory for one chunk: what its devices keep, on the way there, and what became of it, on the way back."""

    given: SharedBuffer
    result: SharedBuffer


@dataclass
class Process:
    slots: list[ChunkSlot]
    connection: Connection | None = None
    process: Any = None
    waiting: deque[tuple[int, tuple[str, ...]]] = field(
        default_factory=deque
    )  # (slot, chunk) that it owes, oldest first


class Pool:
    def __init__(self, workshop: Workshop, count: int, chunk: int) -> None:
        row = (workshop.parts.layout.size + workshop.parts.statistics.size) * 4
        size = chunk * row * ROWS + SLACK
        slots = min(max(2, MOST // (size * count)), 64)
        self.workshop, self.board = workshop, SharedBuffer(row * ROWS + SLACK)
        self.processes = [
            Process([ChunkSlot(SharedBuffer(size), SharedBuffer(size)) for _ in range(slots)]) for _ in range(count)
        ]
        for one in self.processes:
            self.start(one)

    def start(self, one: Process) -> None:
        ours, theirs = multiprocessing.Pipe()
        one.process = multiprocessing.get_context("fork").Process(
            target=serve, args=(self, one, theirs, ours), daemon=True
        )
        one.process.start()
        theirs.close()
        one.connection = ours

    def done(
        self, order: Order, chunks: Sequence[tuple[str, ...]], states: States
    ) -> Generator[ChunkResult, None, None]:
        """What becomes of chunks, in their order. Some are done here, too, while others are waited for."""
        told = self.board.wrapped(order)
        world = len(self.processes) + 1
        ranks = [rank_of(number, world) for number in range(len(chunks))]
        left = [deque(number for number, rank in enumerate(ranks) if rank == own) for own in range(world)]
        copied = [len(mine) > len(one.slots) for one, mine in zip(self.processes, left[1:], strict=True)]
        early: dict[int, ChunkResult] = {}  # done here before their turn

        def do_next() -> None:
            number = left[0].popleft()
            early[number] = self.workshop.done(order, chunks[number], states)

        try:
            for one, mine in zip(self.processes, left[1:], strict=True):
                for slot in range(min(len(one.slots), len(mine))):
                    one.waiting.append((slot, chunks[mine.popleft()]))
                    self.tell(one, told, *one.waiting[-1], states)
            for number, rank in enumerate(ranks):
                if not rank:
                    if number not in early:
                        do_next()
                    yield early.pop(number)
                    continue
                one = self.processes[rank - 1]
                while left[0] and len(early) < len(one.slots) and not self.answered(one):
                    do_next()
                slot, found = self.answer(one, told, states, copied[rank - 1])
                if left[rank]:
                    one.waiting.append((slot, chunks[left[rank].popleft()]))
                    self.tell(one, told, *one.waiting[-1], states)
                yield found
        finally:
            if any(one.waiting for one in self.processes):  # whoever asked has lost interest
                self.close()
                for one in self.processes:
                    one.waiting.clear()
                    self.start(one)

    def answered(self, one: Process) -> bool:
        """Whether a process has an answer for us, or is gone."""
        assert one.connection is not None, "it was started"
        try:
            return one.connection.poll()
        except OSError:
            return True

    def tell(self, one: Process, told: bytes, slot: int, chunk: tuple[str, ...], states: States) -> None:
        assert one.connection is not None, "it was started"
        needed = {name: states[name] for name in chunk if name in states}
        with suppress(OSError):  # it is gone: whoever waits for its answer finds that out
            one.connection.send((told, slot, chunk, one.slots[slot].given.wrapped(needed)))

    def answer(self, one: Process, told: bytes, states: States, copied: bool) -> tuple[int, ChunkResult]:
        """The oldest result that a process owes. One that died is replaced and told again."""
        for _ in range(DEATHS):
            assert one.connection is not None, "it was started"
            slot, chunk = one.waiting[0]
            try:
                data, error = one.connection.recv()
            except (EOFError, OSError):
                one.process.join()
                self.start(one)
                for place, names in one.waiting:
                    self.tell(one, told, place, names, states)
                continue
            one.waiting.popleft()
            if error:
                raise Mistake(error)
            return slot, own_memory(one.slots[slot].result.unwrapped(data), copied)
        raise Mistake(
            f"the process that worked for the clients {', '.join(chunk[:3])}{', …' * (len(chunk) > 3)} died {DEATHS} times: "
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
    """Which process does a chunk. Chunks come in the order of their devices' sizes, so processes take turns there and back.

    >>> [rank_of(number, 3) for number in range(8)]
    [0, 1, 2, 2, 1, 0, 0, 1]
    """
    turn, place = divmod(number, world)
    return world - 1 - place if turn % 2 else place


def own_memory(found: ChunkResult, copied: bool) -> ChunkResult:
    """A result whose tensors stay as they are: what devices keep always, updates if their place is needed again in this round."""
    states = {name: {key: value.clone() for key, value in state.items()} for name, state in found.states.items()}
    if not copied:
        return replace(found, states=states)
    sent = tuple(
        replace(
            one,
            payload={name: value.clone() for name, value in one.payload.items()},
            told=replace(
                one.told,
                counts=one.told.counts.clone(),
                losses=one.told.losses.clone(),
                statistics=None if one.told.statistics is None else one.told.statistics.clone(),
                extras={name: value.clone() for name, value in one.told.extras.items()},
            ),
        )
        for one in found.sent
    )
    return replace(found, sent=sent, states=states)


def serve(pool: Pool, one: Process, connection: Connection, others: Connection) -> None:
    """The life of such a process."""
    bind_to_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    others.close()
    torch.set_num_threads(1)
    while True:
        try:
            told, slot, chunk, data = connection.recv()
        except (EOFError, OSError):
            os._exit(0)
        order: Order = pool.board.unwrapped(told)
        states: States = one.slots[slot].given.unwrapped(data)
        try:
            connection.send((one.slots[slot].result.wrapped(pool.workshop.done(order, chunk, states)), ""))
        except Exception as error:
            connection.send((b"", kind_of(error)))
