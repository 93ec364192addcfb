"""Absent tensors: stand-ins for tensors that another worker holds. They have a shape and a dtype, but no numbers and no
memory.

A result computed from an absent tensor is absent too. Code that reads its numbers is refused with a message.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoestring.core.errors import Mistake
from shoestring.core.model.missing import WITHOUT_NUMBERS
from shoestring.core.private import NO_OVERRIDE, READ_NUMBER, tree_leaves, tree_map, without_numbers

aten = torch.ops.aten
SHAPED_BY_VALUES = {aten.nonzero.default, aten.masked_select.default, aten.unique_consecutive.default}


class Absent(Tensor):
    """Made with `absent`. Its shape is kept in a tensor on the meta device."""

    shaped: Tensor
    __torch_function__ = NO_OVERRIDE
    number: (
        tuple[int, int] | None
    )  # number among the values of a forward (training/pipeline/stages/walk.py); None: it has none
    forward: object  # the forward in which it has that number
    maker: int  # the block that made it; -1: none, or not recorded

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        given = (args, kwargs or {})
        if func is READ_NUMBER or func in SHAPED_BY_VALUES:
            raise LooksAtAbsent
        device = next(leaf.device for leaf in tree_leaves(given) if isinstance(leaf, Absent))
        if func is aten.index.Tensor:
            given = ((args[0], [one for index in args[1] for one in mask_indices(index)]), {})
        shapes = tree_map(shape_of, given)
        known = {
            id(shape): leaf
            for shape, leaf in zip(tree_leaves(shapes), tree_leaves(given), strict=True)
            if isinstance(shape, Tensor)
        }
        out = WITHOUT_NUMBERS.get(func, func)(*shapes[0], **shapes[1])

        def back(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if (same := known.get(id(leaf))) is not None:  # an in-place operation
                if not isinstance(same, Absent):
                    raise WritesAbsent(same)
                return same
            return absent(leaf, device)

        return tree_map(back, out)


class LooksAtAbsent(Mistake):
    def __init__(self) -> None:
        super().__init__(
            "the model looks at a number that depends on weights (item, bool or a comparison in an if, a shape that follows "
            "from values), and workers that do not compute it do not have it: compute with tensors alone (torch.where), or "
            "use a plan that does not cut the model"
        )


class WritesAbsent(Mistake):
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor  # the tensor that would be written to
        super().__init__(
            "the model writes what depends on weights into a tensor that does not, outside of its blocks: other workers would "
            "not see it; do that inside of a block, or compute a new tensor"
        )


def absent(like: Tensor, device: torch.device | None = None, gradient: bool = False) -> Absent:
    """An absent tensor shaped like `like`."""
    found: Absent = without_numbers(Absent, like, device or like.device, gradient)
    found.shaped = like if like.is_meta and type(like) is Tensor else shape_of(like)
    found.number, found.forward, found.maker = None, None, -1
    return found


def shape_of(leaf: Any) -> Any:
    """The stand-in for a leaf in a computation of shapes."""
    if isinstance(leaf, Absent):
        return leaf.shaped
    if isinstance(leaf, Tensor):
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf


def mask_indices(index: Any) -> list[Any]:
    """A mask with numbers, as the indices that it selects along each of its dimensions."""
    if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
        if isinstance(index, Absent):
            raise LooksAtAbsent
        return list(index.nonzero().unbind(1))
    return [index]
