"""The start of a stage's backward: a scalar whose backward passes received gradients to the values that were sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class Boundary(torch.autograd.Function):
    """A scalar whose backward passes received gradients to the values that were sent, so that every backward begins at
    a scalar."""

    @staticmethod
    def forward(ctx: Any, bring: Callable[[], Sequence[Tensor]], *values: Tensor) -> Tensor:
        ctx.bring = bring
        return values[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, *ctx.bring()


def begin_with(bring: Callable[[], Sequence[Tensor]], values: Sequence[Tensor]) -> Tensor:
    """A scalar whose backward passes the gradients that `bring` returns to these values."""
    number: Tensor = Boundary.apply(bring, *values)  # type: ignore[no-untyped-call]
    return number
