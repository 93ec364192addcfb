"""Batches: whatever the user's data yields: a tensor, or tuples, lists and dicts of tensors, nested."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor

from shoestring.core.errors import Mistake
from shoestring.core.user_code.foreign import items_of
from shoestring.core.user_code.seams import calls_user
from shoestring.core.workers.sums import cut_range

Batch = Any


@calls_user("data")
def map_leaves(change: Callable[[Any], Any], batch: Batch) -> Batch:
    """The same structure with `change` applied to every leaf."""
    if isinstance(batch, Mapping):
        changed = {key: map_leaves(change, value) for key, value in batch.items()}
        return changed if type(batch) is dict else type(batch)(changed)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(type(batch), "_fields"):
        return type(batch)(*(map_leaves(change, value) for value in batch))
    if isinstance(batch, (tuple, list)):
        before = list(items_of(batch))
        after = [map_leaves(change, value) for value in before]
        return batch if all(map(is_, before, after)) else type(batch)(after)
    return change(batch)


def leaves(batch: Batch) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        batch = tuple(batch.values())
    if isinstance(batch, (tuple, list)):
        for value in items_of(batch):
            yield from leaves(value)
    else:
        yield batch


def tensors(batch: Batch) -> Iterator[Tensor]:
    return (leaf for leaf in leaves(batch) if isinstance(leaf, Tensor))


@calls_user("data")
def samples(batch: Batch) -> int:
    """The number of samples in a batch: the first dimension, which its tensors share."""
    sizes = {len(tensor) for tensor in tensors(batch) if tensor.dim() > 0}
    several = sizes - {1} or sizes
    if len(several) != 1:
        found = ", ".join(str(tuple(tensor.shape)) for tensor in tensors(batch)) or "no tensor at all"
        raise Mistake(
            f"a batch that can't be counted or split: its tensors have the shapes {found}; "
            f"give every tensor the samples as first dimension (or size 1 there, if all samples share it)"
        )
    return several.pop()


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on a device."""
    if device.type == "cpu":
        return batch
    return map_leaves(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, batch)


def split(batch: Batch, pieces: int) -> list[Batch]:
    """Consecutive pieces of a batch, as equal as they can be.

    >>> [piece.tolist() for piece in split(torch.arange(5), 2)]
    [[0, 1], [2, 3, 4]]
    """
    count = samples(batch)
    if not count:
        raise Mistake("a batch without samples can't be split: leave it out of the data")
    if pieces > count:
        raise Mistake(
            f"{pieces} pieces of a batch of {count} samples: a piece needs a sample; "
            f"ask for {count} pieces or fewer, or make the batch bigger"
        )
    return [
        map_leaves(partial(rows_of, start=start, stop=stop, count=count), batch)
        for start, stop in cut_range(0, count, pieces)
    ]


@calls_user("data")
def rows_of(leaf: Any, start: int, stop: int, count: int) -> Any:
    """Rows `start` to `stop` of a leaf with one row per sample; any other leaf is shared by all pieces."""
    return leaf[start:stop] if isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == count else leaf
