"""The link that sends: torch.distributed's collectives, each with a deadline (gloo between CPUs, NCCL between GPUs).

Gloo's own reduce-scatter is an all-reduce of which the rest is thrown away; ours sends each part to its owner once, half of the bytes.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from shoestring.core.link import Link, Lost, Received, Sending
from shoestring.core.private import all_gather


class Joined(Link):
    """This process's place in the default process group."""

    imagined = False

    def begin_sum(self, tensor: Tensor) -> Sending:
        return Expected(lambda: dist.all_reduce(tensor, async_op=True))

    def begin_scatter(self, whole: Tensor, part: Tensor) -> Sending:
        others = torch.empty_like(whole)
        return Received(others, part, Expected(lambda: dist.all_to_all_single(others, whole, async_op=True)))

    def begin_gather(self, part: Tensor, whole: Tensor) -> Sending:
        return Expected(lambda: all_gather(whole, part, async_op=True))

    def begin_send(self, tensor: Tensor, to: int) -> Sending:
        return Expected(lambda: dist.isend(tensor, to))

    def receive(self, tensor: Tensor, source: int | None = None) -> int:
        try:
            return dist.recv(tensor, source)
        except RuntimeError as error:
            raise Lost(str(error)) from error

    def objects(self, mine: Any) -> list[Any]:
        if self.loose:
            return [mine]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, mine)
        return found


class Expected:
    """A collective that was begun. A worker that is gone shows as Lost, whatever words the library has for it."""

    def __init__(self, begin: Any) -> None:
        try:
            self.work = begin()
        except RuntimeError as error:
            raise Lost(str(error)) from error

    def wait(self) -> None:
        try:
            self.work.wait()
        except RuntimeError as error:
            raise Lost(str(error)) from error


def joined(rank: int, world: int) -> Link:
    """The link of this process, whose process group is there."""
    return Joined(rank, world)
