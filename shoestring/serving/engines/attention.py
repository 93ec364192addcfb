"""Attention over packed samples: each attends to itself, and samples of equal length are computed in one call.

    (1, heads, total, width)   =   | sample 0 | sample 1 | sample 2 | ...      sorted by length, so a group is a slice
                                     `------ one call ------'

A mask that was made for the padded batch is cut to each sample's part, and left out where it masks nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class Unpackable(Exception):
    """These samples, or this model, can't be computed packed; the text says why."""


@dataclass(frozen=True)
class EqualLengths:
    """Samples of one length that follow each other."""

    rows: slice
    length: int
    positions: slice  # of the packed axis

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.stop - self.rows.start, self.length


class PackedRows:
    """Where the positions of a padded batch are when packed. Lengths are in ascending order."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.count, self.longest, self.total = len(lengths), max(lengths), sum(lengths)
        sizes = torch.tensor(lengths)
        there = torch.arange(self.longest) < sizes[:, None]
        self.index = there.flatten().nonzero()[:, 0]  # of the packed positions in the padded ones
        self.positions = self.index % self.longest
        self.lengths = tuple(lengths)
        self.groups = tuple(equal_lengths(lengths))

    def pack(self, padded: Tensor) -> Tensor:
        """(n or 1, longest, ...) to (1, total, ...)."""
        if padded.shape[0] == 1:
            return padded.index_select(1, self.positions)
        return padded.flatten(0, 1).index_select(0, self.index)[None]

    def unpack(self, packed: Tensor) -> Tensor:
        """(1, total, ...) to (n, longest, ...), with zeros where nothing is."""
        padded = packed.new_zeros(self.count * self.longest, *packed.shape[2:])
        padded.index_copy_(0, self.index, packed[0])
        return padded.view(self.count, self.longest, *packed.shape[2:])


def equal_lengths(lengths: Sequence[int]) -> list[EqualLengths]:
    """
    >>> [(one.shape, one.positions.start, one.positions.stop) for one in equal_lengths([2, 2, 5])]
    [((2, 2), 0, 4), ((1, 5), 4, 9)]
    """
    found, row, position = [], 0, 0
    for length, members in groupby(lengths):
        rows = len(list(members))
        found.append(EqualLengths(slice(row, row + rows), length, slice(position, position + rows * length)))
        row, position = row + rows, position + rows * length
    return found


ATTENTION: Any = F.scaled_dot_product_attention  # AttentionCalls may replace the name
Attend = Callable[..., Tensor]  # as scaled_dot_product_attention


class AttentionCalls(TorchFunctionMode):
    """While inside, calls of `scaled_dot_product_attention` are handed to `attend`."""

    def __init__(self, attend: Attend, apart: Callable[[Tensor], bool] = lambda mask: False) -> None:
        super().__init__()
        self.attend, self.apart = attend, apart

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is ATTENTION:
            return self.attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self.several_heads(func, args, kwargs)
        return func(*args, **kwargs)

    def several_heads(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The function below torch's modules, which calls the attention where no mode sees it. It refuses a mask that has
        not the size of its input, as one that was made for the padded batch has: that goes around it."""
        mask = kwargs.get("attn_mask")
        around = mask is not None and self.apart(mask)
        if around:
            kwargs = {**kwargs, "attn_mask": None, "is_causal": False}
        attend = (lambda *given, **named: self.attend(*given, **named, padded_mask=mask)) if around else self.attend
        before = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = attend
        try:
            return func(*args, **kwargs)
        finally:
            F.scaled_dot_product_attention = before


class PackedAttention:
    """Attention of one packed batch."""

    def __init__(self, rows: PackedRows) -> None:
        self.rows = rows
        self.masks: dict[int, tuple[Tensor, list[Tensor | None]]] = {}  # by id; blocks share masks

    def is_padded(self, mask: Tensor) -> bool:
        """Whether a mask was made for the padded batch."""
        return mask.shape[-1] == self.rows.longest and mask.shape[-2] in (1, self.rows.longest)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        padded_mask: Tensor | None = None,
        **named: Any,
    ) -> Tensor:
        if query.ndim == 3:
            if attn_mask is not None or padded_mask is not None:
                raise Unpackable("its attention has a mask for each head of each sample")
            return self.attend(query[None], key[None], value[None], None, dropout_p, is_causal, **named)[0]
        self.check(query, key, value, dropout_p)
        masks = [self.parts(mask) for mask in (attn_mask, padded_mask) if mask is not None]
        # In memory (1, total, heads, width), as the projection that follows wants it
        result = query.new_empty(1, self.rows.total, query.shape[1], value.shape[-1])
        for number, group in enumerate(self.rows.groups):
            q, k, v = (
                one[0, :, group.positions].unflatten(1, group.shape).transpose(0, 1) for one in (query, key, value)
            )
            mask = combine_masks([parts[number] for parts in masks])
            found = ATTENTION(q, k, v, attn_mask=mask, is_causal=is_causal, **named)
            result[0, group.positions].unflatten(0, group.shape).copy_(found.transpose(1, 2))
        return result.transpose(1, 2)

    def check(self, query: Tensor, key: Tensor, value: Tensor, dropout: float) -> None:
        if dropout:
            raise Unpackable(f"its attention drops out {dropout:.0%} though the model is in eval mode")
        if query.ndim != 4 or any(one.shape[0] != 1 or one.shape[-2] != self.rows.total for one in (query, key, value)):
            shapes = " ".join(str(tuple(one.shape)) for one in (query, key))
            raise Unpackable(f"its attention is not over the positions of its blocks (query and key {shapes})")

    def parts(self, mask: Tensor) -> list[Tensor | None]:
        """Each group's part of a mask; None: it masks nothing."""
        if id(mask) not in self.masks:
            self.masks[id(mask)] = mask, [effective(self.part(mask, group)) for group in self.rows.groups]
        return self.masks[id(mask)][1]

    def part(self, mask: Tensor, group: EqualLengths) -> Tensor:
        mask = mask[(None,) * (4 - mask.ndim)]
        rows, _, queries, keys = mask.shape
        if keys == self.rows.longest and queries in (1, keys) and rows in (1, self.rows.count):
            mask = mask if rows == 1 else mask[group.rows]
            return mask[:, :, : group.length, : group.length]
        if keys == self.rows.total and queries == rows == 1:
            heads = mask.shape[1]
            return mask[0, :, 0, group.positions].reshape(heads, *group.shape).transpose(0, 1)[:, :, None]
        raise Unpackable(
            f"its mask depends on all positions of a batch: a block makes one of the shape {tuple(mask.shape)} for "
            f"{self.rows.count} samples of {self.rows.total} positions"
        )


def effective(mask: Tensor) -> Tensor | None:
    """A mask, or None if it masks nothing."""
    masks = not mask.all() if mask.dtype == torch.bool else bool(mask.any())
    return mask if masks else None


def combine_masks(masks: Sequence[Tensor | None]) -> Tensor | None:
    """
    >>> combine_masks([None, torch.tensor([True])]), combine_masks([])
    (tensor([True]), None)
    """
    found = [mask for mask in masks if mask is not None]
    if len(found) < 2:
        return found[0] if found else None
    if any(one.dtype != found[0].dtype for one in found):
        raise Unpackable("its attention has masks of two dtypes")
    return found[0] & found[1] if found[0].dtype == torch.bool else found[0] + found[1]
