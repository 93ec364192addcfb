"""The link: what a worker says to the others of its group, and how many bytes that is.

    operation    bytes that each of w workers sends, of n bytes in all
    sum          2 (w - 1) / w  n        as a ring, a library or shared memory add up; other ways, and which is taken: core/sums.py
    scatter      (w - 1) / w  n          everybody sends every other worker its part of the sum
    gather       (w - 1) / w  n          everybody sends its part round
    exchange     (w - 1) / w  n          everybody sends every other worker a part of its own
    send         n                       to one other worker, who receives it; not all take part

This class imagines the group: nothing is sent, everything is counted. A rehearsal runs on it, so that the bytes of a step are
predicted by the same program that sends them. `training/links/process_link.py` has the one that sends,
`training/links/shared_memory_link.py` that of
workers of one machine.
"""

from __future__ import annotations

import platform
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from shoestring.core.absent import Absent
from shoestring.core.sums import BY_MESSAGES, LIBRARY, MEMORY, Speeds, room, sent, sums_of

ORDERED = ("x86_64", "AMD64", "i686")  # where everybody sees what was written in the order in which it was
ADDED = {torch.float32, torch.float64, torch.int64, torch.uint8}  # what can be added up in memory


class Sending(Protocol):
    """What was begun and may not be done yet."""

    def wait(self) -> object: ...


class CompletedWork:
    def wait(self) -> None:
        pass


class PeerLost(ConnectionError):
    """A worker of the group can't be reached any more."""


class DeadlinePassed(PeerLost):
    """A worker did not do what another waits for in time; it may be alive, and wait itself."""


class GroupDone(Exception):
    """The group has done what it was to do; raised in an asynchronous worker that is not the one to count steps."""


class Link:
    """A worker's place in its group. Imagined: it is one of `world`, and the others say nothing."""

    imagined = True

    def __init__(
        self,
        rank: int = 0,
        world: int = 1,
        same_machine: bool = False,
        deadline: float = 300.0,
        speeds: Speeds | None = None,
        line: Sequence[int] = (),
    ) -> None:
        self.rank, self.world = rank, world
        self.same_machine = same_machine and platform.machine() in ORDERED  # all workers see the same memory
        self.deadline = deadline  # seconds that a wait for others may take
        self.sent = 0  # bytes so far
        self.speeds = speeds  # by which ways to add up are chosen; None: the usual one
        self.sums = sums_of(speeds, line or range(world))  # `line`: the workers' ranks among all, if these are not all
        self.begun: deque[tuple[Callable[..., None], tuple[Tensor, ...]]] = deque()

    def sum(self, tensor: Tensor) -> Sending:
        """Add up a tensor over all workers, in place."""
        if isinstance(tensor, Absent):  # another stage computes it, and adds it up
            return CompletedWork()
        self.count(self.sum_bytes(tensor))
        return self.begin_sum(tensor)

    def sum_bytes(self, tensor: Tensor) -> int:
        """Bytes that this worker sends to add up a tensor."""
        return sent(self.way(tensor), self.rank, self.sums.machines, tensor.numel(), tensor.itemsize)

    def way(self, tensor: Tensor) -> str:
        """How a tensor is added up: as its size says, or else through memory or by a library."""
        way = self.sums.way(tensor.nbytes)
        if way in BY_MESSAGES:
            return way if tensor.device.type == "cpu" and tensor.is_contiguous() else LIBRARY
        return MEMORY if way != LIBRARY and self.in_memory(tensor) else LIBRARY

    # What is begun here is done, in that order, when anything is waited for

    def later(self, do: Callable[..., None], *tensors: Tensor) -> Sending:
        self.begun.append((do, tensors))
        return self

    def wait(self) -> None:
        while self.begun:
            do, tensors = self.begun.popleft()
            do(*tensors)

    def scatter(self, whole: Tensor, part: Tensor) -> Sending:
        """Add up `whole`, which is `world` parts, over all workers; each keeps its part of the sum.

        Between CPUs it is done at once: who gives the whole away counts on its memory, and nothing would be hidden.
        """
        if isinstance(whole, Absent):
            return CompletedWork()
        self.count((self.world - 1) * part.nbytes)
        sending = self.begin_scatter(whole, part)
        if whole.device.type != "cpu":
            return sending
        sending.wait()
        return CompletedWork()

    def gather(self, part: Tensor, whole: Tensor) -> Sending:
        """Put everybody's part into everybody's whole."""
        if isinstance(part, Absent):
            return CompletedWork()
        self.count((self.world - 1) * part.nbytes)
        return self.begin_gather(part, whole)

    def exchange(self, outgoing: Tensor, incoming: Tensor) -> Sending:
        """Send each worker its part of what goes out; what comes in are the parts that they have for this one."""
        if isinstance(outgoing, Absent):
            return CompletedWork()
        self.count((self.world - 1) * (outgoing.nbytes // self.world))
        return self.begin_exchange(outgoing, incoming)

    def send(self, tensor: Tensor, to: int) -> None:
        """Give another worker a tensor; done when it may be changed again."""
        self.sending(tensor, to).wait()

    def sending(self, tensor: Tensor, to: int, tag: int = 0) -> Sending:
        """The same, begun: it must not be changed before this is waited for. A tag tells messages apart that cross each other."""
        self.count(tensor.nbytes)
        return self.begin_send(tensor, to, tag)

    def open_mailboxes(self) -> None:
        """All workers are about to send their neighbours messages with tags: memory that both see may carry them from now on."""

    def receive(self, tensor: Tensor, source: int | None = None, tag: int = 0) -> int:
        """Take what a worker sends, or any worker, into a tensor; gives who it was."""
        return self.rank if source is None else source

    def objects(self, mine: Any) -> list[Any]:
        """What each worker gave, for all of them; for small things at the beginning and when saving."""
        return [mine] * self.world

    def count(self, size: int) -> None:
        self.sent += size

    def in_memory(self, tensor: Tensor) -> bool:
        """Whether a tensor passes through memory that all workers see."""
        return (
            self.same_machine
            and self.world > 1
            and tensor.nbytes > 0
            and tensor.device.type == "cpu"
            and tensor.dtype in ADDED
            and tensor.is_contiguous()
        )

    def begin_sum(self, tensor: Tensor) -> Sending:
        return (
            self.later(self.add_by_messages, tensor)
            if self.world > 1 and self.way(tensor) in BY_MESSAGES
            else CompletedWork()
        )

    def add_by_messages(self, tensor: Tensor) -> None:
        """Imagined, it takes the room into which others' numbers are received, and nothing comes."""
        self.room_to_add(tensor)

    def room_to_add(self, tensor: Tensor) -> Tensor:
        return tensor.new_empty(room(self.way(tensor), self.rank, self.sums.machines, tensor.numel()))

    def begin_scatter(self, whole: Tensor, part: Tensor) -> Sending:
        return (
            CompletedWork()
            if self.in_memory(whole)
            else Received(torch.empty_like(whole) if self.world > 1 else whole, part)
        )

    def begin_gather(self, part: Tensor, whole: Tensor) -> Sending:
        if self.world == 1:  # nothing is imagined then
            whole.copy_(part)
        return CompletedWork()

    def begin_exchange(self, outgoing: Tensor, incoming: Tensor) -> Sending:
        if self.world == 1:
            incoming.copy_(outgoing)
        return CompletedWork()

    def begin_send(self, tensor: Tensor, to: int, tag: int = 0) -> Sending:
        return CompletedWork()


class Received:
    """Everybody's contribution to a part, to be added up when all are there; in the order of ranks, so that sums are the same."""

    def __init__(self, others: Tensor, part: Tensor, sending: Sending | None = None) -> None:
        self.others, self.part, self.sending = others, part, sending

    def wait(self) -> None:
        if self.sending is not None:
            self.sending.wait()
        torch.sum(self.others.view(-1, len(self.part)), 0, out=self.part)


def agreement(world: int) -> Tensor:
    """What workers tell each other after every step: to stop, to save, and of each how large its process is and was at most."""
    return torch.zeros(2 + 2 * world, dtype=torch.float64)


def agreement_bytes(link: Link) -> int:
    """Bytes that a worker sends for that."""
    return link.sum_bytes(agreement(link.world))
