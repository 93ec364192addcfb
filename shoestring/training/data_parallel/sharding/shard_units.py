"""Units: how the weights of a model are cut into shards, one for every worker.

A unit is a block, or a bucket of weights outside of all blocks. Its weights are flattened into one tensor that is cut
into `world` equal parts, padded at the end. The optimizer steps *pieces*: the part of each weight that lies in this
worker's shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.core.optimization.stepping import parameter_like
from shoestring.core.private import resize_storage
from shoestring.core.running.run import Run
from shoestring.core.workers.link import Link
from shoestring.training.data_parallel.reducer import Bucket, make_buckets, part_of

VECTOR = 16  # numbers: shards begin at a multiple of this


class ShardUnit(Bucket):
    """Weights that are flattened and cut together."""

    def __init__(self, members: Sequence[nn.Parameter], link: Link, block: nn.Module | None, parted: bool) -> None:
        super().__init__(members, link.world * VECTOR)
        self.link, self.block, self.parted = link, block, parted
        self.part = self.size // link.world
        self.begin = link.rank * self.part
        first = members[0]
        self.whole = first.data.new_empty(self.size)
        with torch.no_grad():
            for parameter in members:
                view = part_of(self.whole, self.offsets[parameter], parameter)
                view.copy_(parameter)
                parameter.data = view
            self.whole[sum(parameter.numel() for parameter in members) :].zero_()
        self.own = self.whole[self.begin : self.begin + self.part]
        self.present = True
        if parted:
            self.own = self.own.clone()
            self.release()
        self.pieces = {
            parameter: parameter_like(parameter, self.own[start - self.begin : stop - self.begin])
            for parameter in members
            for start, stop in [self.span(parameter)]
            if start < stop
        }
        self.gradient: Tensor | None = None  # of this worker's shard

    def span(self, parameter: nn.Parameter) -> tuple[int, int]:
        """Where in the flat tensor this worker's piece of a weight begins and ends."""
        start = self.offsets[parameter]
        return max(start, self.begin), min(start + parameter.numel(), self.begin + self.part)

    def gather(self) -> None:
        """All-gather the unit's weights."""
        if not self.present:
            resize_storage(self.whole, self.size)
            self.link.gather(self.own, self.whole).wait()
            self.present = True

    def release(self) -> None:
        """Keep only this worker's shard."""
        if self.present and self.parted:
            resize_storage(self.whole, 0)
            self.present = False


def cut_up(run: Run, stage: int) -> list[tuple[nn.Module | None, list[nn.Parameter]]]:
    """The members of every unit, with its block, in the order in which backward comes to them. Weights that several
    stages use form a unit of their own, so that the workers of all these stages cut them alike."""
    count: dict[nn.Parameter, int] = {}
    for block in run.blocks.values():
        for parameter in block.parameters():
            count[parameter] = count.get(parameter, 0) + 1
    inside: list[tuple[nn.Module | None, list[nn.Parameter]]] = []
    for block in reversed(list(run.blocks.values())):
        own = [
            parameter
            for parameter in block.parameters()
            if count[parameter] == 1 and (stage == 3 or parameter.requires_grad) and parameter not in run.held.shared
        ]
        inside += [(block, members) for members in alike(own)]
    outside = [
        parameter
        for parameter in run.model.parameters()
        if count.get(parameter, 0) != 1
        and (stage == 3 or parameter.requires_grad)
        and parameter not in run.held.elsewhere
        and parameter not in run.held.shared
    ]
    return [
        *inside,
        *((None, members) for kind in alike(outside) for members in make_buckets(kind)),
        *((None, [one]) for one in run.held.shared),
    ]


def alike(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Weights that can share a flat tensor: of one dtype and device, all trained or all frozen."""
    kinds: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.dtype, parameter.device, parameter.requires_grad), []).append(parameter)
    return list(kinds.values())
