"""The few samples on which the damage of single weights is measured, as one batch if possible: it runs at least once
per weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoestring.compression.calibration.model_outputs import Outputs
from shoestring.core.batch import Batch, leaves, map_leaves, samples, split
from shoestring.core.errors import Mistake

AT_MOST = 1 << 22  # elements of outputs held for one batch
CLOSE = 1e-4  # tolerance between outputs of a batch and of its parts, relative to the largest number


def first_samples(batch: Batch, count: int) -> Batch:
    """About the first `count` samples of a batch; the whole batch if it can't be split."""
    try:
        return split(batch, max(1, samples(batch) // count))[0]
    except Mistake:
        return batch


def join_if_equivalent(parts: Sequence[Batch], said: Callable[[Sequence[Batch]], list[Outputs]]) -> list[Batch]:
    """Join batches into one if the model gives the same outputs for it, else leave them as they are. `said`: runs the
    model."""
    try:
        whole = join_batches(parts)
        return [whole] if len(parts) > 1 and same_outputs(said([whole])[0], said(parts)) else list(parts)
    except Exception:  # samples of different shapes, or a forward that takes no batch of this size
        return list(parts)


def join_batches(parts: Sequence[Batch]) -> Batch:
    """Concatenate batches. Raises Mistake if they don't fit together.

    >>> join_batches([(torch.zeros(1, 2), "x"), (torch.ones(1, 2), "x")])
    (tensor([[0., 0.],
            [1., 1.]]), 'x')
    """
    counts, columns = [samples(one) for one in parts], list(zip(*map(leaves, parts), strict=True))
    if not all(isinstance(one[0], Tensor) or all(other == one[0] for other in one) for one in columns):
        raise Mistake("batches whose other values than tensors differ can't be joined")
    found = iter(
        [
            torch.cat(one)
            if isinstance(one[0], Tensor)
            and all(each.dim() and len(each) == count for each, count in zip(one, counts, strict=True))
            else one[0]
            for one in columns
        ]
    )
    return map_leaves(lambda _: next(found), parts[0])


def same_outputs(whole: Outputs, parts: Sequence[Outputs]) -> bool:
    """Whether the outputs of a batch equal those of its parts. They do not if samples interact, as in contrastive
    models."""
    if sum(one.numel() for one in whole.values()) > AT_MOST:
        return False
    for name, one in whole.items():
        other = torch.cat([part[name] for part in parts])
        if one.shape != other.shape or not bool((one - other).abs().max() <= CLOSE * other.abs().max()):
            return False
    return True
