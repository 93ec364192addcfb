"""The few samples on which single weights are tried: one batch if they can be, as the model answers them once or more for every weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoestring.compression.calibration.answers import Answer
from shoestring.core.batch import Batch, leaves, mapped, samples, split
from shoestring.core.errors import Mistake

AT_MOST = 1 << 22  # numbers of answers: more are not held for one batch
CLOSE = 1e-4  # answers to one batch and to its parts may differ by so much, of the largest number: by rounding


def a_part(batch: Batch, count: int) -> Batch:
    """Some samples of a batch; all of it, if it can't be cut."""
    try:
        return split(batch, max(1, samples(batch) // count))[0]
    except Mistake:
        return batch


def as_one(parts: Sequence[Batch], said: Callable[[Sequence[Batch]], list[Answer]]) -> list[Batch]:
    """These batches as one, where the model gives the same answers to it; else as they are. `said`: its answers."""
    try:
        whole = joined(parts)
        return [whole] if len(parts) > 1 and same_answers(said([whole])[0], said(parts)) else list(parts)
    except Exception:  # samples of different shapes, or a forward that takes no batch of this size
        return list(parts)


def joined(parts: Sequence[Batch]) -> Batch:
    """The samples of all parts. Raises Mistake where they don't fit together.

    >>> joined([(torch.zeros(1, 2), "x"), (torch.ones(1, 2), "x")])
    (tensor([[0., 0.],
            [1., 1.]]), 'x')
    """
    counts, columns = [samples(one) for one in parts], list(zip(*map(leaves, parts), strict=True))
    if not all(isinstance(one[0], Tensor) or all(other == one[0] for other in one) for one in columns):
        raise Mistake("batches that differ in what is no tensor can't be joined")
    found = iter(
        [
            torch.cat(one)
            if isinstance(one[0], Tensor)
            and all(each.dim() and len(each) == count for each, count in zip(one, counts, strict=True))
            else one[0]
            for one in columns
        ]
    )
    return mapped(lambda _: next(found), parts[0])


def same_answers(whole: Answer, parts: Sequence[Answer]) -> bool:
    """Whether answers to one batch are those to its parts: they are not where samples are compared with each other."""
    if sum(one.numel() for one in whole.values()) > AT_MOST:
        return False
    for name, one in whole.items():
        other = torch.cat([part[name] for part in parts])
        if one.shape != other.shape or not bool((one - other).abs().max() <= CLOSE * other.abs().max()):
            return False
    return True
