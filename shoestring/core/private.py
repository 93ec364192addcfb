"""The one file that touches torch's private names, so that a new torch has one place to break."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._prims_common import suggest_memory_format as memory_format
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

UNTRACEABLE = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)

# torch 2.13 renamed it
all_gather: Any = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor

__all__ = ["UNTRACEABLE", "WATCHING", "DispatchMode", "FakeTensor", "FakeTensorMode", "all_gather", "memory_format", "next_node_number",
           "node_number", "number_of", "resize_storage", "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten", "without_modes"]


class DispatchMode(TorchDispatchMode):
    """Sees every operation. Nothing is compiled inside it, so torch need not guard it against the compiler at each call."""

    def __init__(self) -> None:
        super().__init__()   # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


WATCHING: list[Callable[[torch.Tensor], object]] = []   # who wants to know of storages that change their size: no mode sees that


def resize_storage(tensor: torch.Tensor, count: int) -> None:
    """Give the storage of a tensor room for so many of its numbers; what they are is left open."""
    tensor.untyped_storage().resize_(count * tensor.element_size())
    for see in WATCHING:
        see(tensor)


def number_of(value: torch.Tensor) -> float:
    """The number in a tensor; in a rehearsal, which has none and where it is only passed on, 0."""
    return 0.0 if isinstance(value, FakeTensor) else float(value)


def next_node_number() -> int:
    """The number that the next autograd node made in this thread will carry."""
    return int(torch._C._autograd._get_sequence_nr())


def node_number() -> int | None:
    """The number of the autograd node that is running backward now; None outside backward and for leaves."""
    node: Any = torch._C._current_autograd_node()
    if node is None:
        return None
    number = int(node._sequence_nr())
    return None if number < 0 or number >= 2**62 else number
