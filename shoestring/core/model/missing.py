"""Output shapes of torch operations for which torch itself has no meta function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoestring.core.private import CTC_LOSSES, GROUPED_PRODUCT


def grouped_mm(
    left: Tensor,
    right: Tensor,
    offsets: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Shape of a grouped matrix product; rows are padded to 16 bytes, as the real kernel does."""
    shape: tuple[int, ...]
    if left.dim() == 2 and right.dim() == 2:
        assert offsets is not None, "two 2-D factors need offsets"
        shape = (len(offsets), left.shape[0], right.shape[1])
    elif left.dim() == 2:
        shape = (left.shape[0], right.shape[-1])
    elif right.dim() == 2:
        shape = (left.shape[1], right.shape[1])
    else:
        shape = (left.shape[0], left.shape[1], right.shape[-1])
    dtype = out_dtype or left.dtype
    each = 16 // dtype.itemsize
    padded = -(-shape[-1] // each) * each
    strides = (padded, 1) if len(shape) == 2 else (shape[1] * padded, padded, 1)
    return left.new_empty_strided(shape, strides, dtype=dtype)


def ctc_loss(scores: Tensor, targets: Tensor, *lengths_and_more: Any, **more: Any) -> tuple[Tensor, Tensor]:
    """A loss per sample, and what its backward needs: room for the longest target that the shape allows."""
    steps, samples = scores.shape[0], scores.shape[1] if scores.dim() == 3 else 1
    longest = targets.shape[-1]
    return scores.new_empty(samples), scores.new_empty(samples, steps, 2 * longest + 1)


WITHOUT_NUMBERS: dict[Any, Callable[..., Any]] = {GROUPED_PRODUCT: grouped_mm, **dict.fromkeys(CTC_LOSSES, ctc_loss)}
