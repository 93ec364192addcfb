"""Run modules' code without lasting effects: their state is copied for that time and restored afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from torch import Tensor, nn

from shoestring.core.private import storage_id_of, without_modes

BOOKS = frozenset(nn.Module().__dict__) | {"forward"}  # nn.Module's own attributes, and what techniques replace
PLAIN = (int, float, str, bool, type(None), complex, bytes)


@contextmanager
def scratch(top: nn.Module, everything: nn.Module) -> Iterator[set[int]]:
    """While inside, a part of a model (`everything`) writes to copies of its buffers and attributes; yields the ids of
    the copies' storages.

    Weights are not copied: nothing is computed with them. State outside of the model (globals, closures) is not
    seen."""
    memo: dict[int, Any] = {id(one): one for one in (*everything.parameters(), *everything.modules())}
    shared = set(memo)
    before = [(module, dict(module.__dict__)) for module in top.modules()]
    books = [
        (one, one.copy())
        for _, was in before
        for name, one in was.items()
        if name in BOOKS and isinstance(one, (dict, set))
    ]
    with without_modes():
        for module, was in before:
            module.__dict__["_parameters"] = dict(was["_parameters"])
            module.__dict__["_buffers"] = {name: copy_value(one, memo) for name, one in was["_buffers"].items()}
            module.__dict__.update({name: copy_value(value, memo) for name, value in was.items() if name not in BOOKS})
    copies = [one for key, one in memo.items() if key not in shared and isinstance(one, Tensor) and one.numel()]
    try:
        yield {storage_id_of(one) for one in copies if not one.is_sparse}
    finally:
        for module, was in before:
            module.__dict__.clear()
            module.__dict__.update(was)
        for one, content in books:  # the same dict objects: handles that remove hooks refer to them
            one.clear()
            one.update(content)


def copy_value(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, PLAIN):
        return value
    try:
        return deepcopy(value, memo)
    except Exception:  # a lock, a tensor with a graph: use the object itself
        if isinstance(value, Tensor):
            memo[id(value)] = value.detach().clone()
        return memo.get(id(value), value)
