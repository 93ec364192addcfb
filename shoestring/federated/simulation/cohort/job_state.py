"""Finds the state that a job's model, forward, loss and metrics keep between calls, so that it can be restored for
every device.

A loss with a running mean, a counter in a closure or a memory bank of earlier outputs would leak from one simulated
device to the next, and the result would depend on which process a device worked in. So all such state is restored
before every device.

For models see training/memory/recompute/block_state.py. For functions we follow closure variables, defaults, attributes, and the
globals that their code reads or sets; for objects also their classes with their attributes and methods; except those of
libraries. State elsewhere (an iterator's place, C++ memory) is not found; agreement.py tests for it.
"""

from __future__ import annotations

import dis
from collections.abc import Callable
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from shoestring.core.job import Job
from shoestring.measure.holdings import is_of_library
from shoestring.training.memory.recompute.block_state import DEPTH, BlockState, Frozen


class FrozenCell:
    """The value of a closure variable, to be restored."""

    def __init__(self, cell: CellType) -> None:
        self.cell, self.then = cell, cell.cell_contents

    def same(self) -> bool:
        return self.cell.cell_contents is self.then

    def put(self) -> None:
        self.cell.cell_contents = self.then


class FrozenGlobals:
    """The values of the globals that a function uses, to be restored. Some may not exist yet."""

    def __init__(self, function: FunctionType) -> None:
        self.function, self.names = function, globals_used(function.__code__)
        self.then = self.now()

    def now(self) -> dict[str, Any]:
        space = self.function.__globals__
        return {name: space[name] for name in self.names if name in space}

    def same(self) -> bool:
        now = self.now()
        return now.keys() == self.then.keys() and all(now[name] is value for name, value in self.then.items())

    def put(self) -> None:
        space = self.function.__globals__
        for name in self.now().keys() - self.then.keys():
            del space[name]
        space.update(self.then)


class FrozenClass:
    """The attributes of a class, to be restored. No method of its metaclass is called."""

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.then = self.now()

    def now(self) -> dict[str, Any]:
        hidden = ("__", "_abc_")  # Python's own
        return {name: value for name, value in vars_of(self.kind).items() if not name.startswith(hidden)}

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


class JobState(BlockState):
    """All state that a job keeps between calls of its model, forward, loss and metrics."""

    def __init__(self, job: Job, model: nn.Module) -> None:
        super().__init__(model)
        self.called: tuple[Callable[..., Any] | None, ...] = (job.forward, job.loss, job.metrics, job.weight)

    def follow_all(self, found: dict[int, Frozen]) -> None:
        super().follow_all(found)
        for one in self.called:
            self.follow("", one, found, DEPTH, copied=False)

    def follow(self, name: str, value: Any, found: dict[int, Frozen], depth: int, copied: bool) -> None:
        if isinstance(value, type):
            self.follow_class(value, found)
        elif isinstance(value, nn.Module):
            if id(value.__dict__) not in found:
                self.follow_module(value, found)
        elif isinstance(value, FunctionType):
            if id(value) not in found:
                self.follow_function(value, found)
        elif isinstance(value, (MethodType, partial)):
            parts = (
                (value.__self__, value.__func__)
                if isinstance(value, MethodType)
                else (value.func, value.args, value.keywords)
            )
            for one in parts:
                self.follow(name, one, found, DEPTH, copied)
        else:
            super().follow(name, value, found, depth, copied)
            self.follow_class(type(value), found)

    def follow_module(self, module: nn.Module, found: dict[int, Frozen]) -> None:
        super().follow_module(module, found)
        for one in module.modules():
            self.follow_class(type(one), found)

    def follow_class(self, kind: type, found: dict[int, Frozen]) -> None:
        """Record a class of the user's and those that it inherits from, with what their attributes and methods hold."""
        for one in type.mro(kind):
            state = FrozenClass(one) if id(one) not in found and not is_of_library(vars_of(one)) else None
            if state is not None:
                found[id(one)] = state
                for name, value in state.then.items():
                    self.follow(name, underlying(value), found, DEPTH, copied=False)
                self.follow("", vars_of(one).get("__call__"), found, DEPTH, copied=False)

    def follow_function(self, function: FunctionType, found: dict[int, Frozen]) -> None:
        library = is_of_library(function.__globals__)
        used = FrozenGlobals(function)
        if not library:
            found[id(function)] = used
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if id(cell) not in found and has_value(cell):
                found[id(cell)] = FrozenCell(cell)
                self.follow(name, cell.cell_contents, found, DEPTH, copied=False)
        self.follow_names(function.__dict__, found, DEPTH, copied=False)
        for name, value in {
            "": (function.__defaults__, function.__kwdefaults__),
            **({} if library else used.then),
        }.items():
            self.follow(name, value, found, DEPTH, copied=False)


def vars_of(kind: type) -> dict[str, Any]:
    """The names of a class as Python stores them, without those that it inherits."""
    return dict(type.__dict__["__dict__"].__get__(kind))


def underlying(value: Any) -> Any:
    """The function of a static method, class method or property; other values as they are."""
    if isinstance(value, (staticmethod, classmethod)):
        return value.__func__
    return value.fget if isinstance(value, property) else value


def has_value(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # the variable is assigned later
        return False


def globals_used(code: CodeType) -> frozenset[str]:
    """The names of the globals that code reads or sets, including functions nested in it.

    >>> sorted(globals_used(compile("global a\\na = b", "", "exec")))
    ['a']
    """
    own = {one.argval for one in dis.get_instructions(code) if one.opname.endswith("_GLOBAL")}
    return frozenset(own).union(*(globals_used(one) for one in code.co_consts if isinstance(one, CodeType)))
