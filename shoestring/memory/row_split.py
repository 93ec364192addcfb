"""Embeddings and heads that are too large to be in memory whole: they are computed a few rows at a time.

    embedding    y = W[ids]          rows [a, b) of W serve the ids in [a, b)                         the same bits
    linear       y = x W' + b        rows [a, b) of W give the columns [a, b) of y;
                                     dx = sum over the cuts of dy[a:b] W[a:b]                         another order of that sum

A weight may be used by several modules (a head tied to the embedding) or several times: its gradient waits on the shelf until the
backward of its last use, which steps it row by row. The gradient's sum over uses is the same in any order of two.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shoestring.memory.disk_store import Buffer, Shelf
from shoestring.memory.offloaded_optimizer import CHUNK, Parked, Ring
from shoestring.memory.recompute import autocast_as, autocast_state

VECTOR = 16   # numbers that kernels take at once


def rows_of(weight: nn.Parameter) -> int:
    """Rows of a weight that are brought through memory at once: whole vectors of numbers, because kernels round the rest of a
    stretch in another way than its vectors."""
    return max(CHUNK // weight.shape[1] // VECTOR * VECTOR, VECTOR)


def can_be_cut(module: nn.Module) -> bool:
    if type(module) is nn.Embedding:
        return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
    return type(module) is nn.Linear


class Cut:
    """One weight on the shelf, by rows."""

    def __init__(self, weight: nn.Parameter, name: str, shelf: Shelf) -> None:
        self.weight, self.name, self.shelf = weight, name, shelf
        self.rows = rows_of(weight)
        self.uses = 0             # forwards whose backward is still to come
        self.summed = False       # whether a part of the gradient waits on the shelf
        self.device = weight.device
        for number, (begin, end) in enumerate(self.spans):
            size = (end - begin) * weight.shape[1] * weight.element_size()
            shelf.place(f"{name}[{number}]", size)
            shelf.place(f"gradient of {name}[{number}]", size)

    @property
    def spans(self) -> list[tuple[int, int]]:
        count = self.weight.shape[0]
        return [(begin, min(begin + self.rows, count)) for begin in range(0, count, self.rows)]

    def connect(self, weights: Ring, gradients: Ring, parked: Parked) -> None:
        self.weights, self.gradients, self.parked = weights, gradients, parked

    def part(self, buffer: Buffer, number: int) -> Tensor:
        begin, end = self.spans[number]
        return buffer.part(0, self.weight.dtype, (end - begin, self.weight.shape[1]))

    def stock(self, value: Tensor) -> None:
        """Put the weight on the shelf."""
        for number, (begin, end) in enumerate(self.spans):
            buffer = self.weights.blank(f"{self.name}[{number}]")
            self.part(buffer, number).copy_(value[begin:end])
            self.shelf.write(f"{self.name}[{number}]", buffer)

    def fetch(self, number: int) -> Tensor:
        """Rows of the weight on its device, until the next call."""
        return self.part(self.weights.fetch(f"{self.name}[{number}]"), number).to(self.device)

    def settle(self, number: int, gradient: Tensor, last: bool) -> None:
        """Take the gradient of one use: of the last one, with all before, it moves the rows; others wait."""
        region = f"gradient of {self.name}[{number}]"
        held = None
        if self.summed or not last:
            buffer = self.gradients.fetch(region) if self.summed else self.gradients.blank(region)
            held = self.part(buffer, number)
            held.copy_(held + gradient.to("cpu") if self.summed else gradient)
        if not last:
            self.shelf.write(region, buffer)
            return
        whole = gradient.to("cpu") if held is None else held
        buffer = self.weights.fetch(f"{self.name}[{number}]")
        self.parked.step_chunk(self.weight, number, self.part(buffer, number).view(-1), whole.contiguous().view(-1))
        self.shelf.write(f"{self.name}[{number}]", buffer)

    def used(self) -> bool:
        """The backward of one use begins; gives whether it is the last."""
        self.uses -= 1
        return self.uses == 0

    def passed(self, last: bool) -> None:
        """That backward is over."""
        if last:
            self.parked.finish(self.weight)
        self.summed = not last

    def flush(self) -> None:
        """Backward is over. A use that got no gradient is not waited for."""
        if self.summed:
            for number in range(len(self.spans)):
                self.settle(number, torch.zeros(()), last=True)
            self.passed(last=True)
        self.uses = 0

    def forward_of(self, module: nn.Module) -> Callable[[Tensor], Tensor]:
        """What to call instead of a module's forward."""

        def forward(given: Tensor) -> Tensor:
            trained = torch.is_grad_enabled() and self.weight.requires_grad
            self.uses += trained
            hook = torch.zeros((), requires_grad=trained)
            if isinstance(module, nn.Embedding):
                return Rows.apply(hook, given, self, module.padding_idx)   # type: ignore[no-any-return, no-untyped-call]
            return Columns.apply(hook, given, module.bias, self)   # type: ignore[no-any-return, no-untyped-call]

        return forward


class Rows(torch.autograd.Function):
    """An embedding by rows."""

    @staticmethod
    def forward(ctx: Any, hook: Tensor, ids: Tensor, cut: Cut, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.cut, ctx.padding = cut, padding
        out: Tensor | None = None
        for number, (begin, end) in enumerate(cut.spans):
            found = functional.embedding((ids - begin).clamp(0, end - begin - 1), cut.fetch(number))
            out = found if out is None else torch.where(((ids >= begin) & (ids < end)).unsqueeze(-1), found, out)
        assert out is not None, "a weight has rows"
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient, (ids,) = gradients[0], ctx.saved_tensors
        last = ctx.cut.used()
        for number, (begin, end) in enumerate(ctx.cut.spans):
            here = (ids >= begin) & (ids < end)
            if ctx.padding is not None:
                here &= ids != ctx.padding % ctx.cut.weight.shape[0]
            nowhere = end - begin   # a row more, which takes no gradient
            local = torch.where(here, ids - begin, nowhere)
            slope = torch.ops.aten.embedding_dense_backward(gradient, local, nowhere + 1, nowhere, False)
            ctx.cut.settle(number, slope[:nowhere], last)
        ctx.cut.passed(last)
        return None, None, None, None


class Columns(torch.autograd.Function):
    """A linear layer by columns of its result."""

    @staticmethod
    def forward(ctx: Any, hook: Tensor, x: Tensor, bias: Tensor | None, cut: Cut) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.cut, ctx.cast = cut, autocast_state(x.device.type)
        out: Tensor | None = None
        for number, (begin, end) in enumerate(cut.spans):
            found = functional.linear(x, cut.fetch(number), None if bias is None else bias[begin:end])
            if len(cut.spans) == 1:
                return found
            out = found.new_empty((*x.shape[:-1], cut.weight.shape[0])) if out is None else out
            out[..., begin:end] = found
        assert out is not None, "a weight has rows"
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient, (x, bias) = gradients[0], ctx.saved_tensors
        cut, last = ctx.cut, ctx.cut.weight.requires_grad and ctx.cut.used()
        slope: Tensor | None = None
        biases = []
        for number, (begin, end) in enumerate(cut.spans):
            with torch.enable_grad(), autocast_as(ctx.cast):
                given = x.detach().requires_grad_(ctx.needs_input_grad[1])
                weight = cut.fetch(number).detach().requires_grad_(cut.weight.requires_grad)
                offset = None if bias is None else bias[begin:end].detach().requires_grad_(ctx.needs_input_grad[2])
                found = functional.linear(given, weight, offset)
            wanted = [one for one in (given, weight, offset) if one is not None and one.requires_grad]
            slopes = dict(zip(map(id, wanted), torch.autograd.grad(found, wanted, gradient[..., begin:end]), strict=True))
            if id(given) in slopes:
                slope = slopes[id(given)] if slope is None else slope.add_(slopes[id(given)])
            if offset is not None and id(offset) in slopes:
                biases.append(slopes[id(offset)])
            if id(weight) in slopes:
                cut.settle(number, slopes[id(weight)], last)
            del found, given, weight, slopes
        if cut.weight.requires_grad:
            cut.passed(last)
        return None, slope, torch.cat(biases) if biases else None, None
