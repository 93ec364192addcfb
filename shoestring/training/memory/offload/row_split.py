"""Embeddings and heads that are too large to be in memory at once: computed a range of rows at a time.

    embedding    y = W[ids]          rows [a, b) of W serve the ids in [a, b)                         the same bits
    linear       y = x W' + b        rows [a, b) of W give the columns [a, b) of y;
                                     dx = sum over the splits of dy[a:b] W[a:b]                       another order of that sum

A weight may be used by several modules (a head tied to the embedding) or several times: its gradient waits on disk
until the backward of its last use, which steps it row range by row range. With two uses, the order of the sum makes no
difference. Where the step comes later (more micro-batches follow, or the job clips), the sum is added to the gradients
in waiting_gradients.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shoestring.core.errors import Mistake
from shoestring.training.memory.offload.disk_store import AlignedBuffer, DiskStore
from shoestring.training.memory.offload.offloaded_optimizer import CHUNK, BufferRing, OffloadedOptimizer
from shoestring.training.memory.offload.waiting_gradients import WaitingGradients
from shoestring.training.memory.recompute.recompute import autocast_as, autocast_state

VECTOR = 16  # numbers per SIMD vector


def rows_at_once(weight: nn.Parameter) -> int:
    """Rows of a weight per range: whole SIMD vectors, because kernels round the remainder of a range in another way
    than its vectors."""
    return max(CHUNK // weight.shape[1] // VECTOR * VECTOR, VECTOR)


def can_be_split(module: nn.Module) -> bool:
    if type(module) is nn.Embedding:
        return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
    return type(module) is nn.Linear


class RowSplit:
    """One weight on disk, in row ranges numbered as in `spans`."""

    def __init__(self, weight: nn.Parameter, name: str, store: DiskStore) -> None:
        self.weight, self.name, self.store = weight, name, store
        self.rows = rows_at_once(weight)
        self.uses = 0  # forwards whose backward has not run yet
        self.summed = False  # whether gradients of earlier uses wait on disk
        self.complete = True  # whether this is the batch's last micro-batch
        self.steps = True  # whether its gradient is applied at once
        self.running = False  # whether the backward of a step is running
        self.device = weight.device
        for region, size in self.sizes.items():
            store.reserve(region, size, slots=2 if weight.requires_grad else 1)
            if weight.requires_grad:
                store.reserve(f"gradient of {region}", size)

    @property
    def spans(self) -> list[tuple[int, int]]:
        count = self.weight.shape[0]
        return [(begin, min(begin + self.rows, count)) for begin in range(0, count, self.rows)]

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each row range, by its region's name."""
        width = self.weight.shape[1] * self.weight.element_size()
        return {f"{self.name}[{number}]": (end - begin) * width for number, (begin, end) in enumerate(self.spans)}

    def connect(
        self, weights: BufferRing, gradients: BufferRing, offloaded: OffloadedOptimizer, waiting: WaitingGradients
    ) -> None:
        self.weights, self.gradients, self.offloaded, self.waiting = weights, gradients, offloaded, waiting

    def begin_step(self) -> None:
        self.uses, self.summed = 0, False

    def part(self, buffer: AlignedBuffer, number: int) -> Tensor:
        begin, end = self.spans[number]
        return buffer.part(0, self.weight.dtype, (end - begin, self.weight.shape[1]))

    def fill(self, value: Tensor) -> None:
        """Write the weight to disk."""
        for number, (begin, end) in enumerate(self.spans):
            buffer = self.weights.blank(f"{self.name}[{number}]")
            self.part(buffer, number).copy_(value[begin:end])
            self.store.write(f"{self.name}[{number}]", buffer)

    def fetch(self, number: int) -> Tensor:
        """A range of the weight's rows on its device, valid until the next call."""
        return self.part(self.weights.fetch(f"{self.name}[{number}]"), number).to(self.device)

    def take_gradient(self, number: int, gradient: Tensor, last: bool) -> None:
        """Take the gradient of one use of a row range.

        The gradient of the last use, added to the earlier ones, is applied or waits until it may be; the others are
        written to disk.
        """
        region = f"gradient of {self.name}[{number}]"
        held = None
        if self.summed or not last:
            buffer = self.gradients.fetch(region) if self.summed else self.gradients.blank(region)
            held = self.part(buffer, number)
            held.copy_(held + gradient.to("cpu") if self.summed else gradient)
        if not last:
            self.store.write(region, buffer)
            return
        whole = (gradient.to("cpu") if held is None else held).contiguous()
        if self.weight in self.waiting.spans:
            self.waiting.add(self.weight, number, whole.view(-1), keep=not self.steps)
            if self.complete and not self.steps:
                self.waiting.note_norm(self.weight, whole)
        if self.steps:
            self.step(number, whole.view(-1))

    def step(self, number: int, gradient: Tensor) -> None:
        """Step a row range."""
        buffer = self.weights.fetch(f"{self.name}[{number}]")
        self.offloaded.step_chunk(self.weight, number, self.part(buffer, number).view(-1), gradient)
        self.store.write(f"{self.name}[{number}]", buffer)

    def step_rest(self, factor: Tensor | None) -> None:
        """Apply the gradient that waits, if there is one, times `factor` if given."""
        if self.weight not in self.waiting.waiting:
            return
        for number in range(len(self.spans)):
            gradient = self.waiting.read(self.weight, number)
            self.step(number, gradient if factor is None else gradient.mul_(factor.to(gradient.device)))
        self.offloaded.finish(self.weight)

    def begin_backward(self) -> bool:
        """The backward of one use begins; returns whether it is the last use."""
        if not self.running:
            raise Mistake(
                f"the job runs a backward of its own (torch.autograd.grad in the model, the forward or the loss) through the weight "
                f"{self.name}, which is computed in parts from disk, and its gradient would count as the step's: use a plan without "
                f"OffloadModel"
            )
        self.uses -= 1
        return self.uses == 0

    def end_backward(self, last: bool) -> None:
        if last and self.weight in self.waiting.spans:
            self.waiting.note_added(self.weight, keep=not self.steps)
        if last and self.steps:
            self.offloaded.finish(self.weight)
        self.summed = not last

    def flush(self) -> None:
        """The whole backward is over: stop waiting for uses that got no gradient."""
        if self.summed:
            for number in range(len(self.spans)):
                self.take_gradient(number, torch.zeros(()), last=True)
            self.end_backward(last=True)
        self.uses, self.running = 0, False

    def forward_of(self, module: nn.Module) -> Callable[[Tensor], Tensor]:
        """The function that replaces a module's forward."""

        def forward(given: Tensor) -> Tensor:
            trained = torch.is_grad_enabled() and self.weight.requires_grad
            self.uses += trained
            hook = torch.zeros((), requires_grad=trained)
            if isinstance(module, nn.Embedding):
                return SplitEmbedding.apply(hook, given, self, module.padding_idx)  # type: ignore[no-any-return, no-untyped-call]
            return SplitLinear.apply(hook, given, module.bias, self)  # type: ignore[no-any-return, no-untyped-call]

        return forward


class SplitEmbedding(torch.autograd.Function):
    """An embedding computed by row ranges."""

    @staticmethod
    def forward(ctx: Any, hook: Tensor, ids: Tensor, split: RowSplit, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.split, ctx.padding = split, padding
        out: Tensor | None = None
        for number, (begin, end) in enumerate(split.spans):
            found = functional.embedding((ids - begin).clamp(0, end - begin - 1), split.fetch(number))
            out = found if out is None else torch.where(((ids >= begin) & (ids < end)).unsqueeze(-1), found, out)
        assert out is not None, "a weight has rows"
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient, (ids,) = gradients[0], ctx.saved_tensors
        last = ctx.split.begin_backward()
        for number, (begin, end) in enumerate(ctx.split.spans):
            here = (ids >= begin) & (ids < end)
            if ctx.padding is not None:
                here &= ids != ctx.padding % ctx.split.weight.shape[0]
            nowhere = end - begin  # an extra row that takes no gradient
            local = torch.where(here, ids - begin, nowhere)
            slope = torch.ops.aten.embedding_dense_backward(gradient, local, nowhere + 1, nowhere, False)
            ctx.split.take_gradient(number, slope[:nowhere], last)
        ctx.split.end_backward(last)
        return None, None, None, None


class SplitLinear(torch.autograd.Function):
    """A linear layer computed by column ranges of its result."""

    @staticmethod
    def forward(ctx: Any, hook: Tensor, x: Tensor, bias: Tensor | None, split: RowSplit) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.split, ctx.cast = split, autocast_state(x.device.type)
        out: Tensor | None = None
        for number, (begin, end) in enumerate(split.spans):
            found = functional.linear(x, split.fetch(number), None if bias is None else bias[begin:end])
            if len(split.spans) == 1:
                return found
            out = found.new_empty((*x.shape[:-1], split.weight.shape[0])) if out is None else out
            out[..., begin:end] = found
        assert out is not None, "a weight has rows"
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient, (x, bias) = gradients[0], ctx.saved_tensors
        split, last = ctx.split, ctx.split.weight.requires_grad and ctx.split.begin_backward()
        slope: Tensor | None = None
        biases = []
        for number, (begin, end) in enumerate(split.spans):
            with torch.enable_grad(), autocast_as(ctx.cast):
                given = x.detach().requires_grad_(ctx.needs_input_grad[1])
                weight = split.fetch(number).detach().requires_grad_(split.weight.requires_grad)
                offset = None if bias is None else bias[begin:end].detach().requires_grad_(ctx.needs_input_grad[2])
                found = functional.linear(given, weight, offset)
            wanted = [one for one in (given, weight, offset) if one is not None and one.requires_grad]
            slopes = dict(
                zip(map(id, wanted), torch.autograd.grad(found, wanted, gradient[..., begin:end]), strict=True)
            )
            if id(given) in slopes:
                slope = slopes[id(given)] if slope is None else slope.add_(slopes[id(given)])
            if offset is not None and id(offset) in slopes:
                biases.append(slopes[id(offset)])
            if id(weight) in slopes:
                split.take_gradient(number, slopes[id(weight)], last)
            del found, given, weight, slopes
        if split.weight.requires_grad:
            split.end_backward(last)
        return None, slope, torch.cat(biases) if biases else None, None
