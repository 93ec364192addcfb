"""Plain SGD with the same bits as torch.optim.SGD.

    w  <-  w - rate gradient

Creating the first optimizer of torch.optim imports torch's compiler, which takes longer than everything else before the
first round of a small federation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor


class Optimizer(Protocol):
    """What local training needs of an optimizer."""

    param_groups: list[dict[str, Any]]
    state: defaultdict[Any, Any]

    def zero_grad(self, set_to_none: bool = True) -> None: ...

    def step(self) -> Any: ...


class Sgd:
    """Plain SGD, without torch.optim's slow first import."""

    def __init__(self, weights: Iterable[Tensor], rate: float) -> None:
        self.rate = rate
        self.param_groups: list[dict[str, Any]] = [{"params": list(weights)}]
        self.state: defaultdict[Any, Any] = defaultdict(dict)  # always empty

    def zero_grad(self, set_to_none: bool = True) -> None:
        for weight in self.param_groups[0]["params"]:
            weight.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for weight in self.param_groups[0]["params"]:
            if weight.grad is not None:
                weight.add_(weight.grad, alpha=-self.rate)
