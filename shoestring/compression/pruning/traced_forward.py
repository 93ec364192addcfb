"""State of axis tracing: what is known of each tensor, and helpers shared by the operators' rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

from torch import Tensor

from shoestring.compression.pruning.axes import Dim, freeze, leaves, new_dim, regroup_axes, unify
from shoestring.compression.pruning.record import RecordedCall

OUTSIDE = "it is a dimension of an input"
PRODUCT = "two activations are multiplied along it"


@dataclass
class Known:
    """What is known of one tensor."""

    dims: list[Dim]
    weights: frozenset[str]  # weights it is computed from; empty for activations and constants
    data: bool  # it depends on the model's input


@dataclass
class TracedForward:
    """Result of tracing one forward pass."""

    weights: dict[str, Known] = field(default_factory=dict)  # parameters and buffers, by name
    readers: list[tuple[str, Dim]] = field(default_factory=list)  # (weight, the dimension it sums over)
    heads: list[Dim] = field(default_factory=list)  # batch dimensions of products of two activations
    channels: list[Dim] = field(default_factory=list)  # dimensions of convolutions
    groups: list[tuple[str, Dim]] = field(default_factory=list)  # (weight, the groups of its convolution or norm)
    known: dict[int, Known] = field(default_factory=dict)  # by the identity of the tensor
    unknown: set[str] = field(default_factory=set)  # operators without a rule

    def of(self, tensor: Tensor) -> Known:
        if id(tensor) not in self.known:
            self.known[id(tensor)] = Known([new_dim(size, OUTSIDE) for size in tensor.shape], frozenset(), True)
        return self.known[id(tensor)]

    def dims(self, tensor: Tensor) -> list[Dim]:
        return self.of(tensor).dims

    def sum_over(self, one: Tensor, first: Dim, other: Tensor, second: Dim) -> None:
        """Note that a product of two tensors is summed over a dimension of each."""
        unify(first, second)
        if self.of(one).data and self.of(other).data:
            freeze(first, PRODUCT)
        for tensor in (one, other):
            if not self.of(tensor).data:
                self.readers += [(name, first) for name in self.of(tensor).weights]


Rule = Callable[
    [TracedForward, RecordedCall], Sequence[Sequence[Dim]]
]  # -> the dimensions of every tensor that comes out


def freeze_unknown(found: TracedForward, call: RecordedCall) -> list[list[Dim]]:
    why = f"{call.name} is not followed"
    if any(axis for tensor in call.inputs for dim in found.dims(tensor) for axis in leaves(dim) if not axis.frozen):
        found.unknown.add(call.name)
    freeze((axis for tensor in call.inputs for dim in found.dims(tensor) for axis in dim), why)
    return [[new_dim(size, why) for size in tensor.shape] for tensor in call.outputs]


def view_rule(found: TracedForward, call: RecordedCall) -> list[list[Dim]]:
    return [regroup_axes(found.dims(call.inputs[0]), tensor.shape) for tensor in call.outputs]


def index_of(dim: int, tensor: Tensor) -> int:
    return dim % max(1, tensor.dim())


def slice_dim(dim: Dim, total: int, length: int, start: int) -> Dim:
    """The dimension of a slice: an equal part of the whole keeps its axis, anything else is frozen."""
    if length == total:
        return dim
    if length > 0 and total % length == 0 and start % length == 0:
        outer, inner = regroup_axes([dim], (total // length, length))
        freeze(outer, "parts of it are taken")
        return inner
    freeze(dim, "a slice of it is taken")
    return new_dim(length, "a slice of it is taken")


def keep_equal_sizes(dims: Sequence[Dim], shape: Sequence[int]) -> list[Dim]:
    """Keep dimensions of unchanged size; replace others by new, frozen ones (the caller froze the old ones)."""
    why = "its size changes on the way"
    return [
        dim if prod((axis.size for axis in leaves(dim)), start=1) == size else new_dim(size, why)
        for dim, size in zip(dims, shape, strict=True)
    ]
