"""What a block returns, as far as shapes go: how to make the absent output of a block that another worker computes again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoestring.core.model.absent import Absent, absent
from shoestring.core.private import tree_flatten, tree_unflatten


@dataclass(frozen=True)
class BlockOutput:
    """A block's output: its structure, and for each leaf a tensor to imitate, the number of an argument, or a plain
    value."""

    structure: Any
    leaves: tuple[Any, ...]

    def again(self, given: Sequence[Any]) -> Any:
        made = [
            given[leaf.number]
            if isinstance(leaf, Argument)
            else absent(leaf.shaped, leaf.device)
            if isinstance(leaf, Absent)
            else leaf
            for leaf in self.leaves
        ]
        return tree_unflatten(made, self.structure)


@dataclass(frozen=True)
class Argument:
    number: int


PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device)


def recipe_of(out: Any, given: Sequence[Any]) -> BlockOutput | None:
    """How to make the same output again; None where that can't be told."""
    places = {id(leaf): number for number, leaf in enumerate(given) if isinstance(leaf, Tensor)}
    leaves, structure = tree_flatten(out)
    kept: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor) and id(leaf) in places:
            kept.append(Argument(places[id(leaf)]))
        elif isinstance(leaf, (Absent, *PLAIN)):
            kept.append(leaf)
        else:
            return None
    return BlockOutput(structure, tuple(kept))


def kind_of(leaf: Any) -> Any:
    """The properties of one argument that a block's output shapes depend on."""
    if isinstance(leaf, Tensor):
        return type(leaf) is Absent, leaf.dtype, leaf.shape, leaf.stride()
    return leaf if isinstance(leaf, PLAIN) else type(leaf)
