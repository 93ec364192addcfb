"""Inspect the user's objects without calling any of their methods.

A model or a batch may hold anything: a tuple whose `len` raises, a list that counts its readers, an object with
computed attributes. Torch never calls them, so neither do we: containers are read by the methods of the built-in class
that they are or inherit from, and attributes from where Python stores them. A copy of a model shares with it whatever
can't be copied.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

import torch
from torch import nn

# OrderedDict comes before dict, because it keeps an order of its own
CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, deque, set, tuple, frozenset)


def container_kind(value: object) -> Any:
    """The built-in container class that an object is or inherits from; None if it is none.

    >>> container_kind([]), container_kind(OrderedDict()), container_kind("a")
    (<class 'list'>, <class 'collections.OrderedDict'>, None)
    """
    return next((kind for kind in CONTAINERS if issubclass(type(value), kind)), None)


def items_of(container: Any) -> Iterator[Any]:
    """The items of a container; for a dict, its values.

    >>> list(items_of({"a": 1, "b": 2})), list(items_of((3, 4))), list(items_of("no container"))
    ([1, 2], [3, 4], [])
    """
    kind = container_kind(container)
    if kind is None:
        return iter(())
    return iter(kind.values(container)) if issubclass(kind, dict) else iter(kind.__iter__(container))


def entries_of(container: Any) -> list[Any]:
    """The entries of a container; for a dict, (key, value) pairs.

    >>> entries_of({"a": 1}), entries_of([2])
    ([('a', 1)], [2])
    """
    kind = container_kind(container)
    return list(kind.items(container)) if kind is not None and issubclass(kind, dict) else list(items_of(container))


def attributes_of(value: object) -> dict[str, Any] | None:
    """An object's own attributes, as Python stores them; None if it has none.

    >>> attributes_of(ValueError()), attributes_of(3)
    ({}, None)
    """
    for kind in type.mro(type(value)):
        slot = type.__dict__["__dict__"].__get__(kind).get("__dict__")
        if isinstance(slot, (GetSetDescriptorType, MemberDescriptorType)):
            found = slot.__get__(value)
            return found if type(found) is dict else None
        if slot is not None:  # the class defines __dict__ itself
            return None
    return None


def slots_of(value: object) -> dict[Any, Any]:
    """The slots of an object (`__slots__`) that have a value: descriptor -> value.

    >>> class Point:
    ...     __slots__ = ("x", "y")
    >>> point = Point()
    >>> point.x = 1
    >>> [(slot.__name__, found) for slot, found in slots_of(point).items()]
    [('x', 1)]
    """
    found = {}
    for kind in type.mro(type(value)):
        names = type.__dict__["__dict__"].__get__(kind)
        for name in one_or_many(names.get("__slots__", ())):
            slot = names.get(
                name if not name.startswith("__") or name.endswith("__") else f"_{kind.__name__.lstrip('_')}{name}"
            )
            if isinstance(slot, MemberDescriptorType):
                with suppress(AttributeError):  # it has no value
                    found[slot] = slot.__get__(value)
    return found


def one_or_many(names: Any) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def copy_module(module: nn.Module, instead: Mapping[int, Any]) -> nn.Module:
    """A copy of a module; objects with an id in `instead` are replaced, and whatever can't be copied is shared."""
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise TypeError("the weights of a TorchScript module can't be copied for a try")
    try:
        return deepcopy(module, dict(instead))
    except Exception:
        shared = {
            id(value): value
            for part in module.modules()
            for name, value in part.__dict__.items()
            if name not in BOOKS and not can_be_copied(value, instead)
        }
        return deepcopy(module, shared | dict(instead))


BOOKS = frozenset(nn.Module().__dict__)  # nn.Module's own attributes


def can_be_copied(value: object, instead: Mapping[int, Any]) -> bool:
    try:
        deepcopy(value, dict(instead))
    except Exception:
        return False
    return True
