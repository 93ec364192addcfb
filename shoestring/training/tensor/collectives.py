"""Collectives between workers that hold parts of one layer, as autograd functions with matching forward and backward.

    function         forward                  backward                 used
    copy_in          nothing                  all-reduce               before layers split by outputs (Megatron's f)
    all_reduce       all-reduce               nothing                  after layers split by inputs (Megatron's g)
    gather_in        all-gather               reduce-scatter           as f, where activations between layers are split along the sequence
    reduce_scatter   reduce-scatter           all-gather               as g, likewise
    keep_own_slice   keep own part            all-gather               where the split along the sequence begins: before, all have the same
    all_gather       all-gather               keep own part            where it ends: after, all compute the same

Shoeybi et al.: Megatron-LM, 2019, arXiv 1909.08053; Korthikanti et al.: Reducing Activation Recomputation in Large
Transformer Models, 2022, arXiv 2205.05198.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shoestring.core.workers.link import Link


def copy_in(x: Tensor, link: Link) -> Tensor:
    return Copied.apply(x, link) if x.requires_grad else x  # type: ignore[no-untyped-call]


def all_reduce(x: Tensor, link: Link) -> Tensor:
    """The sum, in the tensor's own memory."""
    return Summed.apply(x.contiguous(), link)  # type: ignore[no-any-return, no-untyped-call]


def gather_in(x: Tensor, link: Link, dim: int) -> Tensor:
    return Gathered.apply(x, link, dim)  # type: ignore[no-any-return, no-untyped-call]


def reduce_scatter(x: Tensor, link: Link, dim: int) -> Tensor:
    return Scattered.apply(x, link, dim)  # type: ignore[no-any-return, no-untyped-call]


def keep_own_slice(x: Tensor, link: Link, dim: int) -> Tensor:
    return KeepOwnSlice.apply(x, link, dim)  # type: ignore[no-any-return, no-untyped-call]


def all_gather(x: Tensor, link: Link, dim: int) -> Tensor:
    return AllGather.apply(x, link, dim)  # type: ignore[no-any-return, no-untyped-call]


class Copied(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, link: Link) -> Tensor:
        ctx.link = link
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient = gradients[0].contiguous()  # the layer's backward made it for this alone, so it may be overwritten
        ctx.link.sum(gradient).wait()
        return gradient, None


class Summed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, link: Link) -> Tensor:
        link.sum(x).wait()
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class Gathered(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, link: Link, dim: int) -> Tensor:
        ctx.link, ctx.dim = link, dim
        return all_parts(x, link, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return part_of_sum(gradients[0], ctx.link, ctx.dim), None, None


class Scattered(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, link: Link, dim: int) -> Tensor:
        ctx.link, ctx.dim = link, dim
        return part_of_sum(x, link, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return all_parts(gradients[0], ctx.link, ctx.dim), None, None


class KeepOwnSlice(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, link: Link, dim: int) -> Tensor:
        ctx.link, ctx.dim = link, dim
        return own_part(x, link, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return all_parts(gradients[0], ctx.link, ctx.dim), None, None


class AllGather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, link: Link, dim: int) -> Tensor:
        ctx.link, ctx.dim = link, dim
        return all_parts(x, link, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return own_part(gradients[0], ctx.link, ctx.dim), None, None


def all_parts(part: Tensor, link: Link, dim: int) -> Tensor:
    """All workers' parts, concatenated along a dimension."""
    rows = part.new_empty((link.world, *part.shape))
    link.gather(part.contiguous().view(-1), rows.view(-1)).wait()
    return rows.movedim(0, dim).flatten(dim, dim + 1) if dim else rows.flatten(0, 1)


def part_of_sum(whole: Tensor, link: Link, dim: int) -> Tensor:
    """This worker's part, along a dimension, of the sum of all workers' tensors."""
    rows = whole.unflatten(dim, (link.world, -1)).movedim(dim, 0).contiguous()  # (worker, ...)
    part = torch.empty_like(rows[0])
    link.scatter(rows.view(-1), part.view(-1)).wait()
    return part


def own_part(whole: Tensor, link: Link, dim: int) -> Tensor:
    """A copy of this worker's part, so that the whole can be freed."""
    return whole.chunk(link.world, dim)[link.rank].clone(memory_format=torch.contiguous_format)
