"""What is learnt of axes while a forward is followed, and what several kinds of operations do to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

from torch import Tensor

from shoestring.compression.pruning.axes import Dim, freeze, fresh, leaves, regrouped, unify
from shoestring.compression.pruning.record import RecordedCall

OUTSIDE = "it is a dimension of an input"
PRODUCT = "two activations are multiplied along it"


@dataclass
class Known:
    """What is known of one tensor."""

    dims: list[Dim]
    weights: frozenset[str]  # the weights it is made of; empty for data and for constants
    data: bool  # it depends on what came in


@dataclass
class TracedForward:
    """All that is learnt from one forward."""

    weights: dict[str, Known] = field(default_factory=dict)  # parameters and buffers, by name
    readers: list[tuple[str, Dim]] = field(default_factory=list)  # (weight, the dimension it sums over)
    heads: list[Dim] = field(default_factory=list)  # along these, products of two activations are taken side by side
    channels: list[Dim] = field(default_factory=list)  # dimensions of convolutions
    groups: list[tuple[str, Dim]] = field(default_factory=list)  # (weight, the groups of its convolution or norm)
    known: dict[int, Known] = field(default_factory=dict)  # by the identity of the tensor
    unknown: set[str] = field(default_factory=set)  # operations that are not in the tables

    def of(self, tensor: Tensor) -> Known:
        if id(tensor) not in self.known:
            self.known[id(tensor)] = Known([fresh(size, OUTSIDE) for size in tensor.shape], frozenset(), True)
        return self.known[id(tensor)]

    def dims(self, tensor: Tensor) -> list[Dim]:
        return self.of(tensor).dims

    def sum_over(self, one: Tensor, first: Dim, other: Tensor, second: Dim) -> None:
        """A product of two tensors is summed over a dimension of each."""
        unify(first, second)
        if self.of(one).data and self.of(other).data:
            freeze(first, PRODUCT)
        for tensor in (one, other):
            if not self.of(tensor).data:
                self.readers += [(name, first) for name in self.of(tensor).weights]


Rule = Callable[
    [TracedForward, RecordedCall], Sequence[Sequence[Dim]]
]  # -> the dimensions of every tensor that comes out


def unfollowed(found: TracedForward, call: RecordedCall) -> list[list[Dim]]:
    why = f"{call.name} is not followed"
    if any(axis for tensor in call.inputs for dim in found.dims(tensor) for axis in leaves(dim) if not axis.frozen):
        found.unknown.add(call.name)
    freeze((axis for tensor in call.inputs for dim in found.dims(tensor) for axis in dim), why)
    return [[fresh(size, why) for size in tensor.shape] for tensor in call.outputs]


def viewed(found: TracedForward, call: RecordedCall) -> list[list[Dim]]:
    return [regrouped(found.dims(call.inputs[0]), tensor.shape) for tensor in call.outputs]


def index_of(dim: int, tensor: Tensor) -> int:
    return dim % max(1, tensor.dim())


def pieces(dim: Dim, total: int, length: int, start: int) -> Dim:
    """The dimension of a slice: one of several equal parts keeps its axis, anything else is frozen."""
    if length == total:
        return dim
    if length > 0 and total % length == 0 and start % length == 0:
        outer, inner = regrouped([dim], (total // length, length))
        freeze(outer, "parts of it are taken")
        return inner
    freeze(dim, "a slice of it is taken")
    return fresh(length, "a slice of it is taken")


def reshaped_to(dims: Sequence[Dim], shape: Sequence[int]) -> list[Dim]:
    """Dimensions that are kept where the size is the same, new and frozen where it is not (the caller froze what changed)."""
    why = "its size changes on the way"
    return [
        dim if prod((axis.size for axis in leaves(dim)), start=1) == size else fresh(size, why)
        for dim, size in zip(dims, shape, strict=True)
    ]
