"""Record the inputs of matrix products with given weights, at the level of operators.

Module hooks would miss products that do not go through a submodule's call (nn.MultiheadAttention and its out_proj).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.compression.pruning.record import plain_kernels
from shoestring.core.private import DispatchMode

TURNED = ("aten.t.default", "aten.transpose.int", "aten.permute.default")
PRODUCTS = ("aten.mm.default", "aten.addmm.default")


@dataclass(frozen=True)
class Read:
    """One matrix product: inputs (rows, n) times a weight whose dimension `dim` has size n."""

    name: str
    dim: int
    inputs: Tensor
    bias: Tensor | None  # the added row, if any


class ProductRecorder(DispatchMode):
    """Dispatch mode that reports matrix products with given weights."""

    def __init__(self, weights: dict[int, str], see: Callable[[Read], object]) -> None:
        super().__init__()
        self.weights, self.see = weights, see
        self.turned: dict[int, tuple[str, Tensor]] = {}  # transposed weights; kept alive so that their ids stay unique

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if name in TURNED and id(args[0]) in self.weights and args[0].dim() == 2:
            self.turned[id(result)] = (self.weights[id(args[0])], result)
        elif name in PRODUCTS:
            bias, inputs, weight = args if len(args) == 3 else (None, *args)
            bias = bias if bias is not None and bias.dim() == 1 else None
            if id(weight) in self.turned:
                self.see(Read(self.turned[id(weight)][0], 1, inputs, bias))
            elif id(weight) in self.weights:
                self.see(Read(self.weights[id(weight)], 0, inputs, bias))
        return result


def products_with(model: nn.Module, weights: dict[int, str], run: Callable[[nn.Module], object]) -> list[Read]:
    """The products of one forward pass with weights, which are given as id -> name."""
    found: list[Read] = []
    with torch.no_grad(), plain_kernels(), ProductRecorder(weights, found.append):
        run(model)
    return found


def second_moments(
    model: nn.Module, names: Iterable[str], batches: Sequence[Any], forward: Callable[[nn.Module, Any], object]
) -> dict[str, tuple[int, Tensor]]:
    """For every weight used in matrix products: (dimension that is summed over, sum of x x^T over its inputs)."""
    weights = {id(one): name for name, one in model.named_parameters() if name in set(names)}
    found: dict[str, tuple[int, Tensor]] = {}
    for batch in batches:
        for read in products_with(model, weights, lambda subject, batch=batch: forward(subject, batch)):  # type: ignore[misc]
            added = (read.inputs.mT @ read.inputs).double()
            found[read.name] = (read.dim, found[read.name][1] + added if read.name in found else added)
    return found
