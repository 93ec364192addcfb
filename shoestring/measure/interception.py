"""For techniques that intercept a model's code: replace a module's forward temporarily, and refuse missing
weights."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.core.errors import Mistake
from shoestring.core.private import DispatchMode, extent, tree_leaves


@contextmanager
def patch_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """While inside, the modules have these forwards."""
    before: dict[nn.Module, Any] = {module: module.__dict__.get("forward") for module in forwards}
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module, earlier in before.items():
            if earlier is None:
                del module.forward
            else:
                module.forward = earlier


class OnTop:
    """A forward that adds something to the result of another one. Whoever replaces the inner forward keeps the addition
    on top."""

    def __init__(self, forward: Callable[..., Any], on_top: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self.on_top = on_top
        self.forward = on_top(forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


def instead(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that replaces a module's own, keeping an OnTop addition."""
    now = module.__dict__.get("forward")
    return OnTop(forward, now.on_top) if isinstance(now, OnTop) else forward


class Guard(DispatchMode):
    """Refuses operations on weights that are not here."""

    def __init__(self, absent: Callable[[Tensor], str], advice: str) -> None:
        super().__init__()
        self.absent, self.advice = (
            absent,
            advice,
        )  # returns the name of the missing weight that a tensor is a part of, or an empty string

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten" and func is not torch.ops.aten.detach.default:
            for leaf in tree_leaves((args, kwargs or {})):
                if isinstance(leaf, Tensor) and leaf.layout is torch.strided and (name := self.absent(leaf)):
                    raise Mistake(self.refusal(name))
        return func(*args, **(kwargs or {}))

    def refusal(self, name: str) -> str:
        return (
            f"the model uses the weight {name} outside of the module that it belongs to, where it is "
            f"not loaded: {self.advice}"
        )


class UpdatedGuard(Guard):
    """Refuses operations of a backward on weights that were updated during it.

    A weight is updated when its gradient is complete. Only uses that autograd does not know of (`weight.detach()`,
    `weight.data`, a NumPy array of it) can come later, and would silently be given the new numbers.
    """

    def __init__(self, updated: MemoryRanges, technique: str) -> None:
        super().__init__(updated.name_at, technique)

    def refusal(self, name: str) -> str:
        return (
            f"the model uses the numbers of the weight {name} without a gradient (weight.detach() or weight.data) in a place whose "
            f"backward comes after {self.advice} has updated the weight: use a copy there (weight.detach().clone()), or plan without "
            f"{self.advice}"
        )


class MemoryRanges:
    """Where the numbers of some weights lie, so that tensors which share memory with one are recognised."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int, str]] = []  # (first byte, end, name), in order; weights do not overlap

    def add(self, tensor: Tensor, name: str) -> None:
        insort(self.found, (*extent(tensor), name))

    def drop_sharing(self, whole: Tensor) -> None:
        """Forget all that lie in a tensor."""
        first, end = extent(whole)
        self.found = [one for one in self.found if not first <= one[0] < end]

    def clear(self) -> None:
        self.found.clear()

    def name_at(self, tensor: Tensor) -> str:
        """The name of the weight that a tensor shares numbers with; empty if there is none."""
        if not self.found:
            return ""
        first, end = extent(tensor)
        place = bisect_left(self.found, (end,)) - 1
        return self.found[place][2] if place >= 0 and first < self.found[place][1] else ""
