"""The link between processes: torch.distributed's collectives, each with a deadline (gloo between CPUs, NCCL between
GPUs).

Gloo's reduce-scatter is an all-reduce whose other parts are thrown away; ours sends each part to its owner once, half
of the bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes import c_char
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from shoestring.core.private import all_gather, without_modes
from shoestring.core.workers.link import DeadlinePassed, Link, PeerLost, Received, Sending
from shoestring.core.workers.sum_costs import Speeds
from shoestring.core.workers.sums import BY_MESSAGES
from shoestring.training.links.sums import add_up

SUMS = 1  # tag of messages that belong to an all-reduce, so that `receive` from any worker takes none of them


class ProcessLink(Link):
    """This process's link to a process group; None: the group of all processes. Ranks are those in the group."""

    imagined = False

    def __init__(
        self,
        rank: int,
        world: int,
        same_machine: bool = False,
        deadline: float = 300.0,
        group: dist.ProcessGroup | None = None,
        speeds: Speeds | None = None,
        line: Sequence[int] = (),
    ) -> None:
        super().__init__(rank, world, same_machine, deadline, speeds, line)
        self.group = group

    def begin_sum(self, tensor: Tensor) -> Sending:
        if self.world > 1 and self.way(tensor) in BY_MESSAGES:
            return self.later(self.add_by_messages, tensor)
        return AfterBegun(
            self, PendingCollective(lambda tensor: dist.all_reduce(tensor, group=self.group, async_op=True), tensor)
        )

    def add_by_messages(self, tensor: Tensor) -> None:
        add_up(self, tensor, self.way(tensor), self.room_to_add(tensor))

    def begin_part(self, part: Tensor, to: int) -> Sending:
        """Send a part of a sum. Its bytes are not counted here, because the whole sum was counted."""
        return PendingCollective(lambda part: dist.isend(part, group=self.group, group_dst=to, tag=SUMS), part)

    def begin_to_receive(self, part: Tensor, source: int) -> Sending:
        return PendingCollective(lambda part: dist.irecv(part, group=self.group, group_src=source, tag=SUMS), part)

    def begin_scatter(self, whole: Tensor, part: Tensor) -> Sending:
        others = torch.empty_like(whole)
        return Received(others, part, self.begin_exchange(whole, others))

    def begin_gather(self, part: Tensor, whole: Tensor) -> Sending:
        return AfterBegun(
            self,
            PendingCollective(
                lambda whole, part: all_gather(whole, part, group=self.group, async_op=True), whole, part
            ),
        )

    def begin_exchange(self, outgoing: Tensor, incoming: Tensor) -> Sending:
        return AfterBegun(
            self,
            PendingCollective(
                lambda into, out: dist.all_to_all_single(into, out, group=self.group, async_op=True), incoming, outgoing
            ),
        )

    def begin_send(self, tensor: Tensor, to: int, tag: int = 0) -> Sending:
        return PendingCollective(lambda tensor: dist.isend(tensor, group=self.group, tag=tag, group_dst=to), tensor)

    def receive(self, tensor: Tensor, source: int | None = None, tag: int = 0) -> int:
        until = time.monotonic() + self.deadline
        try:
            if source is not None:
                dist.recv(tensor, group=self.group, tag=tag, group_src=source)
                return source
            found = dist.recv(tensor, group=self.group, tag=tag)
            return found if self.group is None else dist.get_group_rank(self.group, found)
        except RuntimeError as error:
            raise (DeadlinePassed if time.monotonic() >= until else PeerLost)(str(error)) from error

    def objects(self, mine: Any) -> list[Any]:
        self.wait()
        found: list[Any] = [None] * self.world
        with (
            without_modes()
        ):  # gloo's threads free their tensors at unpredictable times; these tensors are not part of training
            dist.all_gather_object(found, mine, group=self.group)
        return found


class AfterBegun:
    """A library call that must be waited for only after the work begun before it is done, or workers would deadlock."""

    def __init__(self, link: Link, sending: Sending) -> None:
        self.link, self.sending = link, sending

    def wait(self) -> None:
        self.link.wait()
        self.sending.wait()


class PendingCollective:
    """A collective that was begun. A lost worker shows as PeerLost, whatever error the library raises."""

    def __init__(self, begin: Callable[..., Any], *tensors: Tensor) -> None:
        self.tensors = tensors  # keeps their memory until all is done
        try:
            with without_modes():
                self.work = begin(*map(borrow, tensors))
        except RuntimeError as error:
            raise PeerLost(str(error)) from error

    def wait(self) -> None:
        try:
            self.work.wait()
        except RuntimeError as error:
            raise PeerLost(str(error)) from error
        self.tensors = ()


def borrow(tensor: Tensor) -> Tensor:
    """A tensor that shares another's memory without owning it. Gloo's threads free their tensors some time after they
    are done, and a tensor's lifetime must not depend on that."""
    if tensor.device.type != "cpu" or not tensor.nbytes or not tensor.is_contiguous():
        return tensor
    return torch.frombuffer((c_char * tensor.nbytes).from_address(tensor.data_ptr()), dtype=tensor.dtype).view(
        tensor.shape
    )


class Rows:
    """Every worker's own numbers, as the rows of one tensor. All workers must read it together."""

    def __init__(self, link: Link, own: Tensor) -> None:
        self.link, self.own = link, own
        self.dtype, self.shape = own.dtype, torch.Size((link.world, *own.shape))
        self.gathered = False

    def pieces(self) -> Iterator[Tensor]:
        """Row by row: the other workers add zeros to the bytes of a row's owner."""
        self.gathered = True
        for rank in range(self.link.world):
            row = self.own.detach().clone() if rank == self.link.rank else torch.zeros_like(self.own)
            self.link.sum(row.reshape(-1).view(torch.uint8)).wait()
            yield row


class OneWorkerTensor:
    """A tensor that one worker has. All workers must read it together, and then all have it."""

    def __init__(self, link: Link, own: Tensor | None, dtype: torch.dtype, shape: torch.Size) -> None:
        self.link, self.own, self.dtype, self.shape = link, own, dtype, shape
        self.gathered = False

    def pieces(self) -> Iterator[Tensor]:
        """The other workers add zeros to the bytes of its owner."""
        self.gathered = True
        found = self.own.detach().clone() if self.own is not None else torch.zeros(self.shape, dtype=self.dtype)
        self.link.sum(found.reshape(-1).view(torch.uint8)).wait()
        yield found


def gather_named_tensors(link: Link, mine: Mapping[str, Tensor]) -> dict[str, OneWorkerTensor]:
    """Every worker's own tensors, by rank and name; workers may have different numbers and sizes of tensors."""
    kinds = link.objects({name: (one.dtype, one.shape) for name, one in mine.items()})
    return {
        f"{rank} {name}": OneWorkerTensor(link, mine[name] if rank == link.rank else None, *kind)
        for rank, named in enumerate(kinds)
        for name, kind in named.items()
    }


def own_named_tensors(everybody: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """The tensors of the worker with this rank."""
    return {
        name: one.clone()
        for key, one in everybody.items()
        for owner, _, name in [key.partition(" ")]
        if owner == str(rank)
    }


def own_row(rows: Tensor, link: Link) -> Tensor | None:
    """This worker's row of a tensor that as many workers saved; None if there were more or fewer."""
    return rows[link.rank].clone() if len(rows) == link.world else None
