"""The engine of `SequencePipeline`: slices of one sequence run one after the other through a causal model, with the
same results as the whole sequence.

Tokens of a causal model interact in attention only, where a token sees earlier ones. While a slice runs, every call of
`scaled_dot_product_attention` is intercepted: the slice's keys and values are appended to those of earlier slices, and
its queries see all of them up to their own position. Slices run backward in reverse order, the last one first: the
gradients that it leaves for earlier keys and values are added when the slices they belong to run backward.

    slice 0   forward ->  writes K[0:a]          backward  adds dK[0:a] of slices 1 and 2
    slice 1   forward ->  writes K[a:b], sees K[0:b]       adds dK[a:b] of slice 2, leaves dK[0:a]
    slice 2   forward ->  writes K[b:c], sees K[0:c]       leaves dK[0:b]

Keys and values of the whole sequence are kept once per call of attention, until the first slice has run backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from inspect import Parameter, signature
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from shoestring.core.errors import Mistake
from shoestring.core.model.absent import Absent
from shoestring.measure.interception import patch_forwards


class SliceSpan(NamedTuple):
    """The position of a slice in its sequence."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


def spans_of(lengths: Iterable[int]) -> list[SliceSpan]:
    """
    >>> spans_of((3, 2))
    [SliceSpan(start=0, stop=3), SliceSpan(start=3, stop=5)]
    """
    ends = list(accumulate(lengths))
    return [SliceSpan(start, stop) for start, stop in zip((0, *ends), ends, strict=False)]


class WholeSequence:
    """The keys (or values) of a whole sequence in one call of attention, and the gradients that later slices leave for
    them."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.rows: Tensor | None = None
        self.later: Tensor | None = None  # gradient for all rows before the slice that ran backward last

    def put(self, own: Tensor, span: SliceSpan) -> Tensor:
        """Write a slice's rows; returns all rows up to them.

        Uses `.data`, because autograd would count the write as a change of what earlier slices saved; they never see
        these rows.
        """
        if self.rows is None:
            self.rows = own.new_empty((*own.shape[:-2], self.length, own.shape[-1]))
        self.rows.data[..., span.start : span.stop, :].copy_(own)
        return self.rows.data[..., : span.stop, :].detach()

    def gradient(self, upto: Tensor, span: SliceSpan) -> Tensor:
        """The gradient of a slice's own rows, given the gradient from its attention for all rows up to them."""
        total = upto if self.later is None else upto + self.later
        self.later = total[..., : span.start, :] if span.start else None
        if not span.start:
            self.rows = None
        return total[..., span.start :, :]


class ConcatSlices(torch.autograd.Function):
    """Appends a slice's keys or values to all earlier ones."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, whole: WholeSequence, span: SliceSpan) -> Tensor:
        ctx.whole, ctx.span = whole, span
        return whole.put(own, span)

    @staticmethod
    def backward(ctx: Any, *upto: Tensor) -> Any:
        return ctx.whole.gradient(upto[0], ctx.span), None, None


class Slicing:
    """One pass of a sequence through a model in slices. While inside `at`, one slice runs forward, and later
    backward."""

    def __init__(self, model: nn.Module, blocks: Mapping[str, nn.Module], lengths: Sequence[int]) -> None:
        self.model, self.blocks = model, blocks
        self.spans = spans_of(lengths)
        self.length = sum(lengths)
        self.now = self.spans[0]
        self.wholes: dict[
            tuple[str, int], tuple[WholeSequence, WholeSequence]
        ] = {}  # keys and values, by block and number of the attention call in it
        self.masks: dict[Any, Tensor] = {}
        self.place, self.calls = "", 0  # the running block, and the number of its attention calls so far
        self.intercepts = False  # whether attention is intercepted now

    @contextmanager
    def at(self, number: int) -> Iterator[None]:
        self.now = self.spans[number]
        self.place, self.calls = "", 0
        with self.watching_model():
            yield

    @contextmanager
    def watching_model(self) -> Iterator[None]:
        """While inside, the model is given its tokens' positions, reports which block runs, and uses sliced
        attention."""
        forwards = {block: self.reporting_block(name, block.forward) for name, block in self.blocks.items()}
        forwards |= {
            part: self.with_positions(forwards.get(part, part.forward)) for part in takes_positions(self.model)
        }
        forwards[self.model] = self.reporting_block("", forwards.get(self.model, self.model.forward))
        with patch_forwards(forwards):
            yield

    def reporting_block(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A block's forward, which reports that it runs. Recomputation in backward calls it too."""

        def entering(*args: Any, **kwargs: Any) -> Any:
            before = self.place, self.calls, self.intercepts
            self.place, self.calls, self.intercepts = name, 0, True
            try:  # torch disables such modes while it runs a backward
                with nullcontext() if before[2] else Intercepting(self.attention):
                    return forward(*args, **kwargs)
            finally:
                self.place, self.calls, self.intercepts = before

        return entering

    def with_positions(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A forward that is given its tokens' positions. Caches are for generation and are switched off."""
        names = signature(forward).parameters

        def placing(*args: Any, **kwargs: Any) -> Any:
            if "position_ids" in names:
                if kwargs.get("position_ids") is None:
                    device = next((leaf.device for leaf in (*args, *kwargs.values()) if isinstance(leaf, Tensor)), None)
                    kwargs["position_ids"] = torch.arange(self.now.start, self.now.stop, device=device)[None]
            else:
                kwargs["start"] = self.now.start
            if "use_cache" in names and kwargs.get("use_cache") is None:
                kwargs["use_cache"] = False
            return forward(*args, **kwargs)

        return placing

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **more: Any,
    ) -> Tensor:
        """The result of `scaled_dot_product_attention` for these rows of the whole sequence."""
        if isinstance(query, Absent):  # another worker computes it
            return functional.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **more)
        why = not_causal(query, key, attn_mask, is_causal, self.now.length)
        if why:
            raise Mistake(f"SequencePipeline: attention in {self.place or 'the model, outside of its blocks'} {why}")
        known = self.wholes.setdefault(
            (self.place, self.calls), (WholeSequence(self.length), WholeSequence(self.length))
        )
        self.calls += 1
        join = ConcatSlices.apply
        keys, values = (join(own, whole, self.now) for own, whole in zip((key, value), known, strict=True))  # type: ignore[no-untyped-call]
        if not self.now.start:
            return functional.scaled_dot_product_attention(
                query, keys, values, dropout_p=dropout_p, is_causal=True, **more
            )
        # Queries in reverse: then the mask is constant along anti-diagonals, so one short vector holds it
        seen = functional.scaled_dot_product_attention(
            query.flip(-2), keys, values, self.mask(query), dropout_p, False, **more
        )
        return seen.flip(-2)

    def mask(self, query: Tensor) -> Tensor:
        """What each of a slice's queries, the last one first, sees of all keys up to its own: number i sees key j if i
        + j < stop."""
        start, stop = self.now
        known = (start, query.dtype, query.device)
        if known not in self.masks:
            edge = query.new_zeros(2 * stop - start - 1)
            edge[stop:] = float("-inf")
            self.masks[known] = edge
        return self.masks[known].as_strided((stop - start, stop), (1, 1))


class Intercepting(TorchFunctionMode):
    """While active, attention calls go to another function."""

    def __init__(self, attention: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attention = attention

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            return self.attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def not_causal(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, length: int) -> str:
    """Why a call of attention is not causal self-attention over a slice's tokens and all before them; empty if it
    is."""
    if mask is not None:
        return (
            f"is given a mask of the shape {tuple(mask.shape)} (for padding, a window or packed samples), and slices know causal "
            "attention without a mask only: give batches without attention_mask"
        )
    if (query.shape[-2], key.shape[-2]) != (length, length):
        return (
            f"has {query.shape[-2]} queries and {key.shape[-2]} keys for a slice of {length} tokens: it is not the attention of a "
            "sequence to itself"
        )
    if not is_causal and length > 1:
        return "is not causal: a token sees later ones, which are in slices that did not run yet"
    return ""


def takes_positions(model: nn.Module) -> list[nn.Module]:
    """The outermost modules whose forward accepts its tokens' positions."""
    if names_position(model):
        return [model]
    return list(dict.fromkeys(part for child in model.children() for part in takes_positions(child)))


def names_position(module: nn.Module) -> bool:
    names = signature(module.forward).parameters
    return "position_ids" in names or ("start" in names and names["start"].default == 0)


def takes_any(module: nn.Module) -> bool:
    """Whether a module's forward passes on keyword arguments that it does not name."""
    return any(one.kind is Parameter.VAR_KEYWORD for one in signature(module.forward).parameters.values())
