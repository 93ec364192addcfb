"""Rows of a batch: find the tensors among a module's arguments that have a row per sample, select rows of all of them,
and reassemble outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor

from shoestring.core.batch import samples
from shoestring.core.errors import Mistake
from shoestring.core.private import tree_flatten, tree_leaves, tree_unflatten

PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(None))


def row_count(args: Any, kwargs: Any) -> int:
    """The number of rows in a call's arguments."""
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if not given:
        raise Mistake("a model with early exits was called without a tensor: rows leave a batch, so give it one")
    return samples(given)


def has_rows(leaf: Any, count: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == count


def select_rows(
    given: Any, rows: Tensor, count: int, shared: frozenset[int] = frozenset(), compact: Tensor | None = None
) -> Any:
    """Select rows of every tensor that has `count` of them; tensors with a number in `shared`, and `compact` ones, stay
    unchanged."""
    leaves, structure = tree_flatten(given)
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *PLAIN)):
            raise Mistake(
                f"a block is given a {type(leaf).__name__}, of which nobody knows which part belongs to which row: rows can't "
                f"leave early; call the model without it (use_cache=False, where it is a cache)"
            )
    return tree_unflatten(
        [
            leaf if leaf is compact or number in shared or not has_rows(leaf, count) else leaf[rows]
            for number, leaf in enumerate(leaves)
        ],
        structure,
    )


def shared_leaves(more: Any, fewer: Any) -> frozenset[int]:
    """Numbers of the tensors that have the same length in calls with more and with fewer rows: they have no rows, so
    all rows share them."""
    many, some = tree_leaves(more), tree_leaves(fewer)
    if len(many) != len(some):
        return frozenset()
    return frozenset(
        number
        for number, (one, other) in enumerate(zip(many, some, strict=True))
        if isinstance(one, Tensor)
        and isinstance(other, Tensor)
        and one.dim()
        and other.dim()
        and len(one) == len(other)
    )


def logits_of(output: Any) -> Tensor:
    """The logits in a model's output: the tensor itself, or its `logits` field."""
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    found = output if isinstance(output, Tensor) else named
    if not isinstance(found, Tensor):
        raise Mistake(
            f"the model gives a {type(output).__name__} without logits: let its forward return a tensor (rows, classes), or an "
            f"output with `logits`, as the classifiers of transformers do"
        )
    return found


def with_logits(kind: Any, logits: Tensor) -> Any:
    """An output of this type with these logits and nothing else: a loss or hidden states would only cover some rows."""
    if issubclass(kind, Tensor):
        return logits
    if issubclass(kind, Mapping) or is_dataclass(kind):
        return kind(logits=logits)
    raise Mistake(
        f"the model gives a {kind.__name__}, which can't be made again with other logits: return a tensor or a dict"
    )


def hidden_state(output: Any) -> Tensor:
    """The hidden state in a block's output: the tensor itself, or the first of a tuple."""
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    if not isinstance(first, Tensor):
        raise Mistake(
            f"a block gives a {type(output).__name__}: exit heads read a tensor, or a tuple whose first is one"
        )
    return first


def with_hidden(output: Any, hidden: Tensor) -> Any:
    """The block's output with another hidden state; the rest of a tuple stays."""
    if isinstance(output, Tensor):
        return hidden
    rest = tuple(output)[1:]
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(hidden, *rest)
    return type(output)((hidden, *rest))
