"""Union-find over tensor dimensions: which dimensions of which tensors must be pruned together.

A dimension of a tensor is a product of axes, outermost first (a dimension of size 1 is the empty product):

    (batch, 384)  viewed as  (batch, 12, 32)      the axis of 384 is split into 12 x 32, in every tensor that has it
    x + y                                         axes at the same position are unified
    x.view(batch, C * H * W)                      a dimension C x H x W

An axis that something depends on as a whole (a mean over it, a model output) is frozen, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Dim = tuple["UnitAxis", ...]  # a dimension: the product of these


class UnitAxis:
    """A node of a union-find forest: a leaf, an alias of another axis, or the product of several."""

    def __init__(self, size: int, frozen: str = "") -> None:
        self.size = size
        self.frozen = frozen  # why it can't be pruned; empty: it can
        self.parts: Dim = ()  # the axes it stands for; empty: it is a leaf

    def leaves(self) -> list[UnitAxis]:
        if not self.parts:
            return [self]
        found = [leaf for part in self.parts for leaf in part.leaves()]
        self.parts = tuple(found)  # path compression
        return found


def new_dim(size: int, frozen: str = "") -> Dim:
    return () if size < 2 else (UnitAxis(size, frozen),)


def leaves(dim: Iterable[UnitAxis]) -> list[UnitAxis]:
    """
    >>> whole = UnitAxis(6)
    >>> unify((whole,), (UnitAxis(2), UnitAxis(3)))
    >>> [leaf.size for leaf in leaves((whole,))]
    [2, 3]
    """
    return [leaf for axis in dim for leaf in axis.leaves()]


def freeze(dim: Iterable[UnitAxis], why: str) -> None:
    for leaf in leaves(dim):
        leaf.frozen = leaf.frozen or why


def split_axis(axis: UnitAxis, outer: int) -> list[UnitAxis]:
    """Split a leaf into two: outer x rest."""
    axis.parts = (UnitAxis(outer, axis.frozen), UnitAxis(axis.size // outer, axis.frozen))
    return list(axis.parts)


def unify(one: Iterable[UnitAxis], other: Iterable[UnitAxis]) -> None:
    """Unify two dimensions of the same size, leaf by leaf; if one is split, split the other. Freeze what does not
    fit."""
    left, right = list(one), list(other)
    if size_of(left) != size_of(right):
        freeze([*left, *right], "tensors of different sizes meet")
        return
    while left and right:
        left, right = leaves(left), leaves(right)
        first, second = left[0], right[0]
        if first is second:
            left, right = left[1:], right[1:]
        elif first.size == second.size:
            second.frozen = first.frozen = first.frozen or second.frozen
            second.parts = (first,)
            left, right = left[1:], right[1:]
        elif first.size % second.size == 0:
            split_axis(first, second.size)
        elif second.size % first.size == 0:
            split_axis(second, first.size)
        else:
            freeze([*left, *right], "it is divided in two ways that do not fit together")
            return


def size_of(dim: Iterable[UnitAxis]) -> int:
    product = 1
    for leaf in leaves(dim):
        product *= leaf.size
    return product


def regroup_axes(dims: Sequence[Dim], shape: Sequence[int]) -> list[Dim]:
    """Dimensions after a view: the same axes in the same order, grouped to the new shape.

    >>> [[axis.size for axis in dim] for dim in regroup_axes([new_dim(2), new_dim(12)], (2, 3, 1, 4))]
    [[2], [3], [], [4]]
    """
    flat = leaves(axis for dim in dims for axis in dim)
    found: list[Dim] = []
    for size in (max(1, size) for size in shape):  # an empty dimension has nothing to trace
        taken: list[UnitAxis] = []
        while (missing := size // max(1, size_of(taken))) > 1 and flat:
            if missing % flat[0].size == 0:
                taken.append(flat.pop(0))
            elif flat[0].size % missing == 0:
                flat = leaves([*split_axis(flat[0], missing), *flat[1:]])
            else:
                break
        if size_of(taken) != size:
            freeze((axis for dim in dims for axis in dim), "a view divides it unevenly")
            return [new_dim(size, "a view divides it unevenly") for size in shape]
        found.append(tuple(taken))
    return found
