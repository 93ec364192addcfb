"""Planning runs the job's own functions, which may keep something: a running mean, a queue of negatives, a list, a
counter, a generator. Whatever they keep is afterwards as it was found, and never holds a fake tensor.

Everything that the functions lead to is looked at, as for memory (measure/holdings.py), and pictured as what a block
keeps is (memory/recompute/block_state.py): tensors, lists and dicts, attributes, class attributes, cells of closures, globals.
Not put back: data, which are read from their beginning by whoever trains; weights; tensors larger than LARGE; what
iterators, caches and C++ keep.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from types import CellType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoestring.core.job import Job
from shoestring.core.private import without_modes
from shoestring.core.user_code.foreign import attributes_of, container_kind, slots_of
from shoestring.measure.holdings import OF_DATA, OURS, functions_of, is_of_library, names_in, objects_in, package_of
from shoestring.training.memory.recompute.block_state import (
    GENERATORS,
    UNCHANGING,
    Frozen,
    FrozenArray,
    FrozenBytes,
    FrozenGenerator,
    FrozenItems,
    FrozenNames,
    FrozenSlots,
    FrozenTensor,
    put_back,
)

LARGE = 1 << 28  # bytes
EMPTY = object()
CACHE = type(cache(lambda: None))
# Modules of Python's library whose objects only hold others
HOLDING = {
    "builtins",
    "collections",
    "contextvars",
    "functools",
    "random",
    "types",
    "_contextvars",
    "_random",
    "_thread",
    "array",
}


class FrozenCell:
    """A variable that a function shares with the one that it was made in."""

    def __init__(self, cell: CellType) -> None:
        self.cell, self.then = cell, content(cell)

    def same(self) -> bool:
        return content(self.cell) is self.then

    def put(self) -> None:
        if self.then is EMPTY:
            del self.cell.cell_contents
        else:
            self.cell.cell_contents = self.then


class FrozenGlobals:
    """Globals that a function uses. Some may not exist yet."""

    def __init__(self, function: FunctionType, names: frozenset[str] | set[str]) -> None:
        self.space, self.names = function.__globals__, names
        self.then = self.now()

    def now(self) -> dict[str, Any]:
        return {name: self.space[name] for name in self.names & self.space.keys()}

    def same(self) -> bool:
        now = self.now()
        return now.keys() == self.then.keys() and all(now[name] is value for name, value in self.then.items())

    def put(self) -> None:
        for name in self.now().keys() - self.then.keys():
            del self.space[name]
        self.space.update(self.then)


class FrozenClass:
    """The attributes of a class. No method of its metaclass is called."""

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.then = self.now()

    def now(self) -> dict[str, Any]:
        names, hidden = type.__dict__["__dict__"].__get__(self.kind), ("__", "_abc_")  # Python's own
        return {name: value for name, value in names.items() if not name.startswith(hidden)}

    def same(self) -> bool:
        now = self.now()
        return now.keys() == self.then.keys() and all(now[name] is value for name, value in self.then.items())

    def put(self) -> None:
        now = self.now()
        for name in now.keys() - self.then.keys():
            type.__delattr__(self.kind, name)
        for name, value in self.then.items():
            if name not in now or now[name] is not value:
                type.__setattr__(self.kind, name, value)


def content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return EMPTY


@contextmanager
def as_found(job: Job) -> Iterator[None]:
    """While inside, the job's functions may be called; afterwards, what they keep is as it was."""
    with without_modes():
        picture = picture_of(functions_of(job, OF_DATA))
    try:
        yield
    finally:
        with without_modes(), torch.no_grad():
            put_back(picture)


def works_by_itself(one: Any) -> bool:
    """Whether an object of Python's library is more than a container: a cache, a queue, a pool of threads. Nobody may
    put its parts back."""
    kind = type(one)
    module = type.__dict__["__module__"].__get__(kind)
    package = module.partition(".")[0] if type(module) is str else ""
    return (package in sys.stdlib_module_names and package not in HOLDING) or kind is CACHE


def picture_of(roots: Iterable[object]) -> list[Frozen]:
    found: list[Frozen] = []
    for one in objects_in(roots, works_by_itself):
        with suppress(RuntimeError, NotImplementedError):  # a tensor without storage
            found += pictures_of(one)
    return found


def pictures_of(one: Any) -> Iterator[Frozen]:
    kind = type(one)
    if issubclass(kind, type):
        names = type.__dict__["__dict__"].__get__(one)
        if not is_of_library(names):
            yield FrozenClass(one)
    elif kind is FunctionType:
        if not is_of_library(one.__globals__):
            yield FrozenGlobals(one, names_in(one.__code__))
    elif kind is CellType:
        yield FrozenCell(one)
    elif issubclass(kind, Tensor):
        if kind is Tensor and one.layout is torch.strided and one.nbytes <= LARGE:
            yield FrozenTensor(one, True, "")
    elif issubclass(kind, GENERATORS):
        yield FrozenGenerator(one)
    elif issubclass(kind, np.ndarray):
        if one.flags.writeable and one.nbytes <= LARGE and not one.dtype.hasobject:
            yield FrozenArray(one)
    elif issubclass(kind, (array, bytearray)):
        yield FrozenBytes(one)
    else:
        yield from pictures_of_parts(one)


def pictures_of_parts(one: Any) -> Iterator[Frozen]:
    """Of what a container or an object holds."""
    container = container_kind(one)
    if container is not None and container not in UNCHANGING:
        items = FrozenItems(one)
        items.items = items.items_now()
        yield items
    if package_of(type.__dict__["__dict__"].__get__(type(one))) == OURS:
        return
    if (names := attributes_of(one)) is not None:
        yield FrozenNames(names)
    if slots_of(one):
        yield FrozenSlots(one)
