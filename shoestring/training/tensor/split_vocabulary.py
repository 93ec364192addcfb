"""A vocabulary split between workers: its embedding, its head, and the cross entropy of the head's output.

Every worker has the rows of its own words, so the logits of all words are never whole on one worker. The head's output
is a `SplitLogits`: it looks like the whole tensor, stays split under operations that keep its last dimension (views,
slices of tokens, casts, factors), and `cross_entropy` of it is computed in parts. For a token with logits x, target t
and words in parts P:

    loss = m + log sum_P sum_{v in P} exp(x_v - m) - x_t        m: the largest of all; three numbers a token are sent

Any other operation in a loss or metric gets the whole tensor, gathered from all workers, with correct gradients:
slower, never wrong.
Shoeybi et al.: Megatron-LM, 2019, arXiv 1909.08053.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from shoestring.core.errors import Mistake
from shoestring.core.private import FakeTensor, tree_map, without_modes
from shoestring.core.workers.link import Link
from shoestring.training.tensor.splits import bounds

CALLS_USER = "model or loss"  # core/user_code/seams.py


def embed_split(layer: nn.Embedding, ids: Tensor, words: int, link: Link) -> Tensor:
    """The output of an embedding of `words` words, of which every worker has a part: zero for others' words, still to
    be summed."""
    check_range(ids, words)
    begin, end = bounds(words, link.rank, link.world)
    own = ids - begin
    outside = (own < 0) | (own >= end - begin)
    padding = layer.padding_idx
    found = functional.embedding(
        own.masked_fill(outside, 0),
        layer.weight,
        padding - begin if padding is not None and begin <= padding < end else None,
    )
    return found.masked_fill_(outside.unsqueeze(-1), 0.0)


def check_range(ids: Tensor, words: int, ignored: int | None = None) -> None:
    """Refuse ids out of range, as torch does: here no worker would have such a word, and nobody would notice."""
    if isinstance(ids, FakeTensor) or not ids.numel():
        return
    with without_modes():
        wrong = (ids < 0) | (ids >= words)
        if ignored is not None:
            wrong &= ids != ignored
        if wrong.any():
            raise IndexError(
                f"{int(ids[wrong][0])} is out of range: the vocabulary has {words} words, from 0 to {words - 1}"
            )


class SplitLogits(Tensor):
    """Logits of all words; this worker has `own`, those of its own words. To torch it is a tensor without memory."""

    own: Tensor
    outline: Tensor  # a meta tensor with the whole shape
    link: Link

    @staticmethod
    def of(own: Tensor, words: int, link: Link) -> SplitLogits:
        with without_modes():
            outline = torch.empty((*own.shape[:-1], words), dtype=own.dtype, device="meta")
            made = outline.as_subclass(SplitLogits)
        made.own, made.outline, made.link = own, outline, link
        return made

    @property
    def words(self) -> int:
        return int(self.outline.shape[-1])

    def whole(self) -> Tensor:
        """All logits, gathered from all workers."""
        return GatherLogits.apply(self.own, self.words, self.link)  # type: ignore[no-any-return, no-untyped-call]

    def like(self, own: Tensor) -> SplitLogits:
        return SplitLogits.of(own, self.words, self.link)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        logits = args[0] if args and isinstance(args[0], SplitLogits) else kwargs.get("input")
        if isinstance(logits, SplitLogits):
            name = getattr(func, "__name__", "")
            if func in SHAPES:
                return func(logits.outline, *args[1:], **kwargs)
            if func in FACTS:
                return func(logits.own, *args[1:], **kwargs)
            if name in ("__repr__", "__str__", "__format__"):
                return f"SplitLogits({tuple(logits.outline.shape)}, of which this worker has {tuple(logits.own.shape)})"
            if name in CHANGES or (name.endswith("_") and not name.endswith("__")):
                raise Mistake(
                    f"the model or the loss calls {name} on what the head gives, which TensorParallel splits by the vocabulary: "
                    f"nothing can be changed or watched there in place; write it without (logits = logits / 2, not /=)"
                )
            if func is functional.cross_entropy and (found := split_cross_entropy(*args, **kwargs)) is not None:
                return found
            if func in CASTS or (
                func in FACTORS and all(isinstance(one, (int, float)) for one in (*args[1:], *kwargs.values()))
            ):
                return logits.like(func(logits.own, *args[1:], **kwargs))
            if func in RESHAPES and (shape := kept_shape(logits, func, args[1:], kwargs)) is not None:
                return logits.like(logits.own.reshape((*shape[:-1], logits.own.shape[-1])))
            if func is Tensor.__getitem__ and spares_words(args[1], logits.outline.dim()):
                return logits.like(func(logits.own, args[1]))
        if isinstance(kwargs.get("out"), SplitLogits):
            raise Mistake(
                "the model or the loss writes into what the head gives, which TensorParallel splits by the vocabulary: write it "
                "without out="
            )
        args, kwargs = tree_map(lambda one: one.whole() if isinstance(one, SplitLogits) else one, (args, kwargs))
        return func(*args, **kwargs)


ANY: Any = Tensor  # gives Tensor's attributes without types

# Operations on the whole shape, on this worker's numbers, and those that leave the last dimension alone
SHAPES: set[Any] = {
    ANY.shape.__get__,
    ANY.ndim.__get__,
    ANY.dtype.__get__,
    ANY.size,
    ANY.dim,
    ANY.ndimension,
    ANY.numel,
    ANY.nelement,
    ANY.__len__,
    ANY.is_floating_point,
    ANY.is_complex,
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}
FACTS: set[Any] = {
    ANY.device.__get__,
    ANY.requires_grad.__get__,
    ANY.is_leaf.__get__,
    ANY.grad_fn.__get__,
    ANY.layout.__get__,
    ANY.is_cuda.__get__,
    ANY.is_sparse.__get__,
    ANY.is_meta.__get__,
    ANY.is_quantized.__get__,
    ANY.get_device,
    ANY.untyped_storage,
}
CHANGES = {
    "__setitem__",
    "__iadd__",
    "__isub__",
    "__imul__",
    "__itruediv__",
    "__idiv__",
    "__ifloordiv__",
    "__imod__",
    "__ipow__",
    "register_hook",
    "retain_grad",
    "__set__",
}
CASTS: set[Any] = {
    Tensor.float,
    Tensor.double,
    Tensor.half,
    Tensor.bfloat16,
    Tensor.to,
    Tensor.clone,
    Tensor.contiguous,
    Tensor.detach,
    Tensor.cpu,
    torch.clone,
    torch.detach,
    Tensor.__neg__,
    Tensor.neg,
}
FACTORS: set[Any] = {Tensor.mul, Tensor.div, Tensor.__mul__, Tensor.__rmul__, Tensor.__truediv__, torch.mul, torch.div}
RESHAPES: set[Any] = {
    Tensor.view,
    Tensor.reshape,
    Tensor.flatten,
    Tensor.unflatten,
    Tensor.squeeze,
    Tensor.unsqueeze,
    torch.reshape,
    torch.flatten,
    torch.squeeze,
    torch.unsqueeze,
}


def kept_shape(logits: SplitLogits, func: Any, args: Any, kwargs: Any) -> torch.Size | None:
    """The whole shape after an operation, if words stay its last dimension."""
    with without_modes():
        found = func(logits.outline, *args, **{name: value for name, value in kwargs.items() if name != "input"})
    kept = found.dim() and found.shape[-1] == logits.words and found.dtype == logits.outline.dtype
    return found.shape if kept else None


def spares_words(index: Any, dims: int) -> bool:
    """Whether an index picks tokens and keeps all words of each.

    >>> [spares_words(index, 3) for index in ((slice(None), slice(0, -1)), (..., slice(0, -1), slice(None)), (..., 0), 2)]
    [True, True, False, True]
    """
    items = index if isinstance(index, tuple) else (index,)
    used = sum(consumed_dimensions(item) for item in items)
    if items and isinstance(items[-1], slice) and items[-1] == slice(None) and used <= dims:
        return True
    last = items[-1] if items else None
    return used < dims and (last is Ellipsis or not any(item is Ellipsis for item in items))


def consumed_dimensions(item: Any) -> int:
    """Number of dimensions that an item of an index consumes."""
    if item is None or item is Ellipsis:
        return 0
    return item.dim() if isinstance(item, Tensor) and item.dtype == torch.bool else 1


def split_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """`functional.cross_entropy` of split logits; None for options that need the whole."""
    plain = (
        weight is None
        and size_average is None
        and reduce is None
        and not label_smoothing
        and not target.is_floating_point()
    )
    if (
        not isinstance(input, SplitLogits)
        or not plain
        or input.outline.dim() > 2
        or reduction not in ("none", "sum", "mean")
    ):
        return None
    expected = input.outline.shape[:-1]
    if target.shape != expected:
        raise ValueError(f"Expected target size {tuple(expected)}, got {tuple(target.shape)}")
    check_range(target, input.words, ignore_index)
    own, targets = input.own.reshape(-1, input.own.shape[-1]), target.reshape(-1)
    begin, _ = bounds(input.words, input.link.rank, input.link.world)
    losses = TokenLosses.apply(
        own.float() if own.dtype in (torch.float16, torch.bfloat16) else own,  # type: ignore[no-untyped-call]
        targets - begin,
        input.link,
    )
    ignored = targets == ignore_index
    losses = losses.masked_fill(ignored, 0.0).view(target.shape)
    if not torch.is_autocast_enabled(own.device.type):
        losses = losses.to(own.dtype)
    if reduction == "none":
        return losses  # type: ignore[no-any-return]
    total = losses.sum()
    return total if reduction == "sum" else total / (~ignored).sum()  # type: ignore[no-any-return]


class TokenLosses(Function):
    """The cross entropy of every token (row), from this worker's logits and the other workers'. Targets count from its
    first word."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, link: Link) -> Tensor:
        rows = logits.new_empty((link.world, len(logits)))
        link.gather(logits.max(1).values, rows.view(-1)).wait()
        most = rows.max(0).values
        outside = (target < 0) | (target >= logits.shape[1])
        place = target.masked_fill(outside, 0).unsqueeze(1)
        sums = torch.stack(
            [(logits - most.unsqueeze(1)).exp_().sum(1), logits.gather(1, place).squeeze(1).masked_fill_(outside, 0.0)]
        )
        link.sum(sums).wait()
        whole = sums[0].log().add_(most)  # log-sum-exp over all words
        ctx.save_for_backward(logits, whole, place, outside)
        return whole - sums[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        logits, whole, place, outside = ctx.saved_tensors
        found = (logits - whole.unsqueeze(1)).exp_()  # the softmax
        found.scatter_add_(1, place, (outside.to(found.dtype) - 1.0).unsqueeze(1))
        return found.mul_(gradients[0].unsqueeze(1)), None, None


class GatherLogits(Function):
    """Gathers split logits. What follows is computed by all workers alike, so each keeps its own part of the
    gradient."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, words: int, link: Link) -> Tensor:
        parts = [bounds(words, place, link.world) for place in range(link.world)]
        ctx.begin, ctx.count = parts[link.rank][0], own.shape[-1]
        most = parts[0][1]
        even = functional.pad(own, (0, most - own.shape[-1])).contiguous()
        rows = own.new_empty((link.world, *even.shape))
        link.gather(even.view(-1), rows.view(-1)).wait()
        return torch.cat([row[..., : end - begin] for row, (begin, end) in zip(rows, parts, strict=True)], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].narrow(-1, ctx.begin, ctx.count).contiguous(), None, None
