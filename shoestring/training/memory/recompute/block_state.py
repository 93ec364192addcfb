"""What a block keeps from one call to the next, and how to restore it to what it was before a call.

A block that is recomputed must find everything as it was the first time: buffers and attributes, whoever changed them
and however (in place, through .data, by a hook that ran before), lists and dicts, NumPy arrays, its own random
generators, and whatever its objects hold. A `picture` is a snapshot of all that before one call. Pictures share what did not change, so
one costs little; tensors that may change in place (buffers, and attributes up to SMALL bytes) are copied.

State that a block keeps elsewhere (a global list, a closure), or in an object that can't be inspected, is not found
here; recompute.py detects it by different results. No method of a user's object is called (core/user_code/foreign.py).
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from shoestring.core.errors import Mistake
from shoestring.core.private import (
    bit_generator,
    is_transformed,
    own_buffers,
    saves_by_own_hooks,
    tree_leaves,
    write_count,
)
from shoestring.core.user_code.foreign import attributes_of, container_kind, items_of, slots_of
from shoestring.measure.fake import unseen_writes
from shoestring.training.memory.recompute.fingerprint import fingerprint, matches

SMALL = 1 << 20  # bytes: larger attributes are not copied
DEPTH = 3  # how deeply nested lists and objects are followed
LONG = 1000  # a container with more items is compared by its length only

# nn.Module's own attributes are left alone; techniques replace `forward`
BOOKS = frozenset(nn.Module().__dict__) - {"training"} | {"forward"}
CHANGE_TOO_LARGE = (
    "a block changes the tensor {name!r} in place, which at {bytes:,} bytes is too large to copy before every call, so it "
    "can't be recomputed: keep it as a buffer, or use a plan without Checkpoint and OffloadModel"
)


def check_saving(technique: str, given: Any) -> None:
    """Refuse to replace what autograd saves of a block where the block is called in a way that does not allow it."""
    if saves_by_own_hooks():
        raise Mistake(
            f"the model changes what autograd saves (torch.autograd.graph.saved_tensors_hooks), and {technique} would replace its hooks "
            f"by others: use a plan without {technique}"
        )
    if any(isinstance(leaf, Tensor) and is_transformed(leaf) for leaf in tree_leaves(given)):
        raise Mistake(
            f"the model calls its blocks in a transform of torch.func (vmap or grad), where {technique} can't replace what "
            f"autograd saves: use a plan without {technique}"
        )


class Frozen(Protocol):
    """The content of a mutable object at one moment."""

    def same(self) -> bool: ...  # whether the object still has this content
    def put(self) -> None: ...  # restore this content


class TooLarge(Mistake):
    """A tensor was changed that is too large to be copied beforehand."""


class FrozenTensor:
    """A tensor, with a copy. On the CPU its bytes are compared. On a GPU that would need a synchronisation, so its
    version counter is compared; batch norm's statistics change without changing the version, so there every call counts
    as a change."""

    def __init__(self, tensor: Tensor, copied: bool, name: str) -> None:
        self.tensor, self.name = tensor, name
        self.version = version(tensor)
        self.copy = tensor.detach().clone() if copied else None
        self.print = fingerprint(tensor) if copied and tensor.device.type == "cpu" else None
        self.passing = tensor.device.type != "cpu" and name in ("running_mean", "running_var")

    def same(self) -> bool:
        return not self.passing and self.version == version(self.tensor) and matches(self.print, self.tensor)

    def put(self) -> None:
        if self.copy is None:
            raise TooLarge(CHANGE_TOO_LARGE.format(name=self.name, bytes=self.tensor.nbytes))
        self.tensor.data.copy_(
            self.copy
        )  # through .data, so the version is unchanged: autograd need not know, since the content is restored again
        self.version = version(self.tensor)


def version(tensor: Tensor) -> tuple[int, int]:
    return (0 if tensor.is_inference() else write_count(tensor)), unseen_writes(tensor)


class FrozenArray:
    """A NumPy array of numbers, with a copy."""

    def __init__(self, array: Any) -> None:
        self.array, self.copy = array, np.array(array)

    def same(self) -> bool:
        now = np.asarray(self.array)
        return now.shape == self.copy.shape and now.tobytes() == self.copy.tobytes()

    def put(self) -> None:
        np.asarray(self.array)[...] = self.copy


class FrozenBytes:
    """An `array.array` or a bytearray."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.kind: Any = array if isinstance(value, array) else bytearray
        self.copy = self.kind.__getitem__(value, slice(None))

    def same(self) -> bool:
        return bool(self.kind.__eq__(self.value, self.copy))

    def put(self) -> None:
        self.kind.__setitem__(self.value, slice(None), self.copy)


class FrozenSlots:
    """The attributes that an object keeps in slots."""

    def __init__(self, value: Any) -> None:
        self.value, self.then = value, slots_of(value)

    def same(self) -> bool:
        now = slots_of(self.value)
        return now.keys() == self.then.keys() and all(now[slot] is value for slot, value in self.then.items())

    def put(self) -> None:
        for slot in slots_of(self.value).keys() - self.then.keys():
            slot.__delete__(self.value)
        for slot, value in self.then.items():
            slot.__set__(self.value, value)


class FrozenItems:
    """A list, deque, dict or set."""

    def __init__(self, container: Any) -> None:
        self.container, self.kind = container, container_kind(container)
        self.length = self.kind.__len__(container)
        self.items = self.items_now() if self.length <= LONG else None

    def items_now(self) -> list[Any]:
        """Its items in order; for a dict its keys, then its values."""
        return [*(self.kind.keys(self.container) if issubclass(self.kind, dict) else ()), *items_of(self.container)]

    def same(self) -> bool:
        if self.kind.__len__(self.container) != self.length or self.items is None:
            return bool(self.kind.__len__(self.container) == self.length)
        return all(map(is_, self.items_now(), self.items))

    def put(self) -> None:
        if self.items is None:
            raise Mistake(
                f"a block keeps a {type(self.container).__name__} of more than {LONG} items and changes it, so it can't be "
                f"recomputed: use a plan without Checkpoint and OffloadModel"
            )
        self.kind.clear(self.container)
        if issubclass(self.kind, dict):
            self.kind.update(self.container, zip(self.items[: self.length], self.items[self.length :], strict=True))
        elif self.kind is set:
            set.update(self.container, self.items)
        else:
            self.kind.extend(self.container, self.items)


class FrozenNames:
    """The attributes of an object, or the buffers of a module, by name."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names
        self.then = self.now()
        self.whole = dict(names)

    def now(self) -> dict[str, Any]:
        return {name: value for name, value in self.names.items() if name not in BOOKS}

    def same(self) -> bool:
        if self.names.keys() == self.whole.keys() and all(
            map(is_, self.names.values(), self.whole.values())
        ):  # the usual case
            return True
        now = self.now()
        return now.keys() == self.then.keys() and all(now[name] is value for name, value in self.then.items())

    def put(self) -> None:
        for name in self.now().keys() - self.then.keys():
            del self.names[name]
        self.names.update(self.then)


class FrozenGenerator:
    def __init__(self, generator: Any) -> None:
        self.generator = generator
        self.state = self.now()

    def now(self) -> Any:
        if isinstance(self.generator, torch.Generator):
            return bytes(self.generator.get_state().numpy())
        if isinstance(self.generator, random.Random):
            return random.Random.getstate(self.generator)  # the base class's: a subclass may have none
        bits = self.generator if isinstance(self.generator, np.random.BitGenerator) else bit_generator(self.generator)
        return bits.state

    def same(self) -> bool:
        return equal(self.now(), self.state)

    def put(self) -> None:
        if isinstance(self.generator, torch.Generator):
            self.generator.set_state(torch.frombuffer(bytearray(self.state), dtype=torch.uint8))
        elif isinstance(self.generator, random.Random):
            random.Random.setstate(self.generator, self.state)
        else:
            bits = (
                self.generator if isinstance(self.generator, np.random.BitGenerator) else bit_generator(self.generator)
            )
            bits.state = self.state


def equal(one: Any, other: Any) -> bool:
    """Whether two states of a generator are equal; NumPy's have arrays in nested dicts."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else bool(one == other)


GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)
UNCHANGING = (tuple, frozenset)
OPAQUE = (
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    type,
    torch.dtype,
    torch.device,
    nn.Module,
    ModuleType,
    FunctionType,
    MethodType,
    BuiltinFunctionType,
)


class BlockState:
    """Everything that a block keeps between calls."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.known: dict[
            int, Frozen
        ] = {}  # id of an object -> its last snapshot, which holds the object so that the id stays valid

    def picture(self) -> list[Frozen]:
        """A snapshot of everything now."""
        found: dict[int, Frozen] = {}
        self.follow_all(found)
        self.known = found
        return list(found.values())

    def follow_all(self, found: dict[int, Frozen]) -> None:
        self.follow_module(self.block, found)

    def follow_module(self, module: nn.Module, found: dict[int, Frozen]) -> None:
        for one in module.modules():
            self.follow_names(one.__dict__, found, DEPTH, copied=False)
            self.follow_names(own_buffers(one), found, DEPTH, copied=True)

    def follow_names(self, names: dict[str, Any], found: dict[int, Frozen], depth: int, copied: bool) -> None:
        if id(names) in found:
            return
        kept = self.last(names) or FrozenNames(names)
        found[id(names)] = kept
        assert isinstance(kept, FrozenNames), "an id in `last` belongs to an object of the same kind"
        for name, value in kept.then.items():
            self.follow(name, value, found, depth, copied)

    def follow(self, name: str, value: Any, found: dict[int, Frozen], depth: int, copied: bool) -> None:
        """Record an object and what it holds; objects that can't be inspected are skipped."""
        if isinstance(value, OPAQUE) or id(value) in found or not depth:
            return
        with suppress(Exception):  # for example a tensor without storage
            self.look_into(name, value, found, depth, copied)

    def look_into(self, name: str, value: Any, found: dict[int, Frozen], depth: int, copied: bool) -> None:
        kind = container_kind(value)
        if isinstance(value, Tensor):
            if not isinstance(value, nn.Parameter) and value.layout is torch.strided:
                found[id(value)] = self.last(value) or FrozenTensor(value, copied or value.nbytes <= SMALL, name)
        elif isinstance(value, GENERATORS):
            found[id(value)] = self.last(value) or FrozenGenerator(value)
        elif isinstance(value, np.ndarray):
            if value.flags.writeable and value.nbytes <= SMALL and not value.dtype.hasobject:
                found[id(value)] = self.last(value) or FrozenArray(value)
        elif isinstance(value, (array, bytearray)):
            if memoryview(value).nbytes <= SMALL:
                found[id(value)] = self.last(value) or FrozenBytes(value)
        elif kind is not None:
            if kind not in UNCHANGING:
                found[id(value)] = self.last(value) or FrozenItems(value)
            if kind.__len__(value) <= LONG:
                for item in list(items_of(value)):
                    self.follow(name, item, found, depth - 1, copied)
        else:
            self.follow_object(name, value, found, depth, copied)

    def follow_object(self, name: str, value: Any, found: dict[int, Frozen], depth: int, copied: bool) -> None:
        """Record the attributes of an object, and what they hold."""
        if (names := attributes_of(value)) is not None:
            self.follow_names(names, found, depth - 1, copied)
        if slots := slots_of(value):
            found[id(value)] = self.last(value) or FrozenSlots(value)
        for one in slots.values():
            self.follow(name, one, found, depth - 1, copied)

    def last(self, value: Any) -> Frozen | None:
        """The last snapshot of an object, if the object has not changed since."""
        known = self.known.get(id(value))
        return known if known is not None and known.same() else None

    @contextmanager
    def as_in(self, picture: list[Frozen]) -> Iterator[None]:
        """While inside, the block has the state of a picture; afterwards its present state is restored."""
        now = self.picture()
        current = set(map(id, now))
        put_back([one for one in picture if id(one) not in current])
        try:
            yield
        finally:
            put_back(now)


def generators_of(model: nn.Module) -> list[FrozenGenerator]:
    """The states of a model's random generators and of Python's and NumPy's global ones."""
    found = [one for one in BlockState(model).picture() if isinstance(one, FrozenGenerator)]
    return [*found, FrozenGenerator(random.random.__self__), FrozenGenerator(np.random.random.__self__)]  # type: ignore[attr-defined]


def put_back(picture: list[Frozen]) -> None:
    for one in picture:
        if not one.same():
            one.put()
