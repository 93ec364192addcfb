"""The link: a worker's communication with the other workers of its group, and its bytes.

    operation    bytes that each of w workers sends, of n bytes in all
    sum          2 (w - 1) / w  n        all-reduce, as a ring, a library or shared memory do it; other algorithms: core/workers/sums.py
    scatter      (w - 1) / w  n          reduce-scatter: every worker sends each other worker its part of the sum
    gather       (w - 1) / w  n          all-gather: every worker sends its part to all
    exchange     (w - 1) / w  n          all-to-all: every worker sends each other worker a part of its own tensor
    send         n                       point to point: only sender and receiver take part

This class imagines the group: nothing is sent, everything is counted. Rehearsals use it, so that the bytes of a step
are predicted by the same program that sends them. The links that send are in `training/links/process_link.py`, and for
workers of one machine in `training/links/shared_memory_link.py`.
"""

from __future__ import annotations

import platform
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from shoestring.core.model.absent import Absent
from shoestring.core.workers.sum_costs import Speeds, sums_of
from shoestring.core.workers.sums import BY_MESSAGES, LIBRARY, MEMORY, room, sent_bytes

ORDERED = ("x86_64", "AMD64", "i686")  # processors on which all cores see writes in the order in which they were made
ADDED = {torch.float32, torch.float64, torch.int64, torch.uint8}  # dtypes that can be summed in shared memory


class Sending(Protocol):
    """An operation that was begun and may not be done yet."""

    def wait(self) -> object: ...


class CompletedWork:
    def wait(self) -> None:
        pass


class PeerLost(ConnectionError):
    """A worker of the group can't be reached any more."""


class DeadlinePassed(PeerLost):
    """A worker did not do in time what another waits for; it may be alive, and waiting itself."""


class GroupDone(Exception):
    """The group is done; raised in asynchronous workers other than the one that counts steps."""


class Link:
    """A worker's place in its group. This class is imagined: the other `world` - 1 workers do not exist."""

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
        self.same_machine = same_machine and platform.machine() in ORDERED  # whether all workers share memory
        self.deadline = deadline  # longest wait for other workers, in seconds
        self.sent = 0  # bytes so far
        self.speeds = speeds  # used to choose all-reduce algorithms; None: the usual one
        self.sums = sums_of(
            speeds, line or range(world)
        )  # `line`: the workers' ranks in the mesh, if these are not all
        self.begun: deque[tuple[Callable[..., None], tuple[Tensor, ...]]] = deque()

    def sum(self, tensor: Tensor) -> Sending:
        """All-reduce: sum a tensor over all workers, in place."""
        if isinstance(tensor, Absent):  # another stage computes and sums it
            return CompletedWork()
        self.count(self.sum_bytes(tensor))
        return self.begin_sum(tensor)

    def sum_bytes(self, tensor: Tensor) -> int:
        """Bytes that this worker sends to all-reduce a tensor."""
        return sent_bytes(self.way(tensor), self.rank, self.sums.machines, tensor.numel(), tensor.itemsize)

    def way(self, tensor: Tensor) -> str:
        """The all-reduce algorithm for a tensor: by its size, else shared memory or the library."""
        way = self.sums.way(tensor.nbytes)
        if way in BY_MESSAGES:
            return way if tensor.device.type == "cpu" and tensor.is_contiguous() else LIBRARY
        return MEMORY if way != LIBRARY and self.in_memory(tensor) else LIBRARY

    # Operations deferred here are done, in order, when anything is waited for

    def later(self, do: Callable[..., None], *tensors: Tensor) -> Sending:
        self.begun.append((do, tensors))
        return self

    def wait(self) -> None:
        while self.begun:
            do, tensors = self.begun.popleft()
            do(*tensors)

    def scatter(self, whole: Tensor, part: Tensor) -> Sending:
        """Reduce-scatter: sum `whole`, which consists of `world` parts, over all workers; each keeps its part of the
        sum.

        Between CPUs it is done at once: the caller counts on freeing `whole`, and nothing would overlap anyway.
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
        """All-gather: concatenate all workers' parts into `whole`, on every worker."""
        if isinstance(part, Absent):
            return CompletedWork()
        self.count((self.world - 1) * part.nbytes)
        return self.begin_gather(part, whole)

    def exchange(self, outgoing: Tensor, incoming: Tensor) -> Sending:
        """All-to-all: send each worker its part of `outgoing`; `incoming` receives the parts that they have for this
        one."""
        if isinstance(outgoing, Absent):
            return CompletedWork()
        self.count((self.world - 1) * (outgoing.nbytes // self.world))
        return self.begin_exchange(outgoing, incoming)

    def send(self, tensor: Tensor, to: int) -> None:
        """Send a tensor to another worker; returns when it may be changed again."""
        self.sending(tensor, to).wait()

    def sending(self, tensor: Tensor, to: int, tag: int = 0) -> Sending:
        """Start to send a tensor, which must not change until this is waited for. Tags tell concurrent messages
        apart."""
        self.count(tensor.nbytes)
        return self.begin_send(tensor, to, tag)

    def open_mailboxes(self) -> None:
        """Called before workers send tagged messages to their neighbours: these may use shared memory from now on."""

    def receive(self, tensor: Tensor, source: int | None = None, tag: int = 0) -> int:
        """Receive a tensor from a worker, or from any worker; returns the sender's rank."""
        return self.rank if source is None else source

    def objects(self, mine: Any) -> list[Any]:
        """All workers' objects, on every worker; for small objects, at the beginning and when saving."""
        return [mine] * self.world

    def count(self, size: int) -> None:
        self.sent += size

    def in_memory(self, tensor: Tensor) -> bool:
        """Whether a tensor is summed through shared memory."""
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
        """Imagined: allocates the memory into which parts would be received; nothing comes."""
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
        if self.world == 1:  # then this is not imagined
            whole.copy_(part)
        return CompletedWork()

    def begin_exchange(self, outgoing: Tensor, incoming: Tensor) -> Sending:
        if self.world == 1:
            incoming.copy_(outgoing)
        return CompletedWork()

    def begin_send(self, tensor: Tensor, to: int, tag: int = 0) -> Sending:
        return CompletedWork()


class Received:
    """All workers' contributions to a part, summed when all have come; in the order of ranks, so that sums are
    reproducible."""

    def __init__(self, others: Tensor, part: Tensor, sending: Sending | None = None) -> None:
        self.others, self.part, self.sending = others, part, sending

    def wait(self) -> None:
        if self.sending is not None:
            self.sending.wait()
        torch.sum(self.others.view(-1, len(self.part)), 0, out=self.part)


def agreement(world: int) -> Tensor:
    """The tensor that workers all-reduce after every step: to stop, to save, and each worker's present and peak process
    size."""
    return torch.zeros(2 + 2 * world, dtype=torch.float64)


def agreement_bytes(link: Link) -> int:
    """Bytes that a worker sends for the agreement."""
    return link.sum_bytes(agreement(link.world))
