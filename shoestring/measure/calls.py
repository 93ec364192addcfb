"""Make calls of a block's other methods, such as a flow's `inverse`, look like calls of its forward.

Watchers of a block, and techniques that wrap one, hook the module's call. While inside `as_calls`, a public method of a
block that is called from outside goes through that call too: the method's name travels among the arguments, so a
recomputed block runs the same method. Inside a block, calls of its own methods are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.core.private import tree_leaves

METHOD = "method_of_block"  # the argument that holds the method's name
ABSENT = object()


@contextmanager
def as_calls(blocks: Iterable[nn.Module]) -> Iterator[None]:
    """While inside, calls of the blocks' methods are calls of the blocks."""
    entrances = {block: entrance(block) for block in blocks if methods(block)}
    with attributes(entrances):
        yield


def methods(block: nn.Module) -> list[str]:
    """Public methods that a block's own class has besides forward."""
    kinds = type(block).__mro__
    torchs = [kind for kind in kinds if kind.__module__.partition(".")[0] == "torch"]
    return [
        name
        for kind in kinds
        if kind not in torchs and issubclass(kind, nn.Module)
        for name, value in vars(kind).items()
        if isinstance(value, FunctionType)
        and not name.startswith("_")
        and not any(hasattr(base, name) for base in torchs)
    ]


def entrance(block: nn.Module) -> dict[str, Callable[..., Any]]:
    """Replacements for a block's methods and its forward."""
    names = ["forward", *methods(block)]
    own = {name: block.__dict__.get(name, ABSENT) for name in names}
    inner = {name: getattr(block, name) for name in names}

    def forward(*args: Any, **kwargs: Any) -> Any:
        with attributes({block: own}):
            return inner[kwargs.pop(METHOD, "forward")](*args, **kwargs)

    def entering(name: str) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and not any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs))):
                return inner[name](*args, **kwargs)  # it sets or reads something, and computes nothing for backward
            return block(*args, **{METHOD: name}, **kwargs)

        return method

    return {"forward": forward} | {name: entering(name) for name in names[1:]}


@contextmanager
def attributes(given: Mapping[nn.Module, Mapping[str, Any]]) -> Iterator[None]:
    """While inside, modules have these instance attributes; ABSENT removes one."""
    before = {module: {name: module.__dict__.get(name, ABSENT) for name in found} for module, found in given.items()}
    set_attributes(given)
    try:
        yield
    finally:
        set_attributes(before)


def set_attributes(given: Mapping[nn.Module, Mapping[str, Any]]) -> None:
    for module, found in given.items():
        for name, value in found.items():
            if value is ABSENT:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = value


def without_caches(value: Any) -> Any:
    """The value without key-value caches of transformers: these are for generation, and filling one twice would be
    wrong. Blocks of transformers take None instead; what others call a cache may be anything, and is left."""
    if isinstance(value, tuple):
        items = [without_caches(item) for item in value]
        return type(value)(*items) if hasattr(type(value), "_fields") else tuple(items)
    return None if any(map(is_cache, type(value).__mro__)) else value


def holds_cache(value: Any) -> bool:
    """Whether `without_caches` changes a value."""
    if isinstance(value, tuple):
        return any(map(holds_cache, value))
    return any(map(is_cache, type(value).__mro__))


def is_cache(kind: type) -> bool:
    return kind.__name__.endswith("Cache") and kind.__module__.partition(".")[0] in (
        "transformers",
        "transformers_modules",
    )
