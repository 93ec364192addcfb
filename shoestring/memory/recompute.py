"""Recomputation from outside: blocks forget what they saved for backward and compute it again when it is asked for.

The user's forward runs as it is, in its own order. While a block of a group runs, every tensor that autograd saves is replaced by
an empty slot, and the call (its arguments, random state, changing buffers) is written down. When backward asks for a slot,
the calls of its group run again and fill all slots of the group. A group may contain groups: on the way through, their
slots are handed on to a new inner group instead of being filled, which is a checkpoint within a checkpoint.

    schedule (0, (1, 2), (3, (4, 5), 6))     0 keeps everything; 1 2 are computed again together;
                                             3 to 6 too, and on that way 4 5 are forgotten once more

An argument that an earlier call of the same group produced is not held but looked up in the replay.
"""
from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shoestring.core.errors import Mistake
from shoestring.core.private import tree_flatten, tree_leaves, tree_unflatten

Schedule = tuple[Any, ...]   # of block numbers and of schedules


def flat(schedule: Schedule) -> list[int]:
    """Block numbers of a schedule, in order.

    >>> flat((0, (1, 2), (3, (4, 5), 6)))
    [0, 1, 2, 3, 4, 5, 6]
    """
    return [number for item in schedule for number in ([item] if isinstance(item, int) else flat(item))]


class Earlier(NamedTuple):
    """An argument that is a result of an earlier call of the group."""

    call: int
    leaf: int
    requires_grad: bool


HELD = object()   # an argument that the call holds itself
MISSING = object()   # an attribute that is not there
CHANGED = ("a block of the model computes something else when it runs again on the same input: it keeps something from one call to the "
           "next, such as a cache or a counter, so it can't be recomputed; switch that off (use_cache=False in models of transformers), "
           "or use a plan without Checkpoint and Stream")


class Slot:
    """What stands in the autograd graph for a tensor that was forgotten."""

    def __init__(self, group: Group, tensor: Tensor) -> None:
        self.group = group
        self.kind = (tensor.shape, tensor.dtype)
        self.value: Tensor | None = None


class Finished(Exception):
    """All slots are filled; the rest of the replay would be for nothing."""


class Keep(torch.autograd.Function):
    """Holds tensors the way autograd does, so that saved-tensor hooks around us (a spill) see them too."""

    @staticmethod
    def forward(ctx: Any, hook: Tensor, *held: Tensor) -> Tensor:
        ctx.save_for_backward(*held)
        return hook.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise AssertionError("this node only holds tensors; nothing flows through it")


State = tuple[dict[str, Any], str, Any]   # where, name, value: a buffer or an attribute of a module


@dataclass
class Call:
    forward: Callable[..., Any]
    number: int
    structure: Any                        # of (args, kwargs)
    leaves: list[Any]                     # tensors replaced by HELD or Earlier
    held: Callable[[], tuple[Tensor, ...]]
    random: tuple[Tensor, ...]
    autocast: tuple[str, bool, torch.dtype, bool]
    state: list[State]                    # what the call changes in its modules, as it was before


@dataclass
class Group:
    schedule: Schedule
    calls: list[Call] = field(default_factory=list)
    slots: list[Callable[[], Slot | None]] = field(default_factory=list)
    results: dict[int, Earlier] = field(default_factory=dict)   # id of a tensor -> where it came from, while recording
    alive: list[Any] = field(default_factory=list)              # keeps those ids valid while recording

    def pack(self, tensor: Tensor) -> Slot:
        slot = Slot(self, tensor)
        self.slots.append(weakref.ref(slot))
        return slot

    def adopt(self, slot: Slot | None) -> None:
        """Take over a slot of the group around us."""
        if slot is not None:
            slot.group = self
        self.slots.append(weakref.ref(slot) if slot is not None else nothing)

    def record(self, call: Call, output: Any) -> None:
        self.calls.append(call)
        for leaf, tensor in enumerate(tree_leaves(output)):
            if isinstance(tensor, Tensor):
                self.results[id(tensor)] = Earlier(len(self.calls) - 1, leaf, tensor.requires_grad)
                self.alive.append(tensor)

    def close(self) -> None:
        self.results.clear()
        self.alive.clear()

    def inner_groups(self) -> dict[int, Schedule]:
        """Call -> the inner schedule it belongs to; empty if the calls did not come as planned."""
        if flat(self.schedule) != [call.number for call in self.calls]:
            return {}
        found: dict[int, Schedule] = {}
        position = 0
        for item in self.schedule:
            size = 1 if isinstance(item, int) else len(flat(item))
            if not isinstance(item, int):
                for call in range(position, position + size):
                    found[call] = item
            position += size
        return found

    def replay(self) -> None:
        """Run the calls again and fill the slots, or hand them on to inner groups."""
        inner = self.inner_groups()
        position = 0
        group: Group | None = None

        def store(tensor: Tensor) -> None:
            nonlocal position
            slot = self.slots[position]()
            if slot is not None and slot.kind != (tensor.shape, tensor.dtype):
                raise Mistake(CHANGED)
            if group is not None:
                group.adopt(slot)
            elif slot is not None:
                slot.value = tensor.detach()
            position += 1
            if position == len(self.slots):
                raise Finished

        outputs: list[list[Any]] = []
        try:
            with torch.enable_grad(), same_random_state(), saved_tensors_hooks(store, never):
                for index, call in enumerate(self.calls):
                    args, kwargs = arguments(call, outputs)
                    begins = index in inner and (index == 0 or inner.get(index - 1) is not inner[index])
                    if group is not None and (begins or index not in inner):
                        group.close()
                        group = None
                    if begins:
                        group = Group(inner[index])
                    if group is not None:
                        again = noted(call.forward, call.number, (args, kwargs), group, keep=False)
                        again.state, again.random = call.state, call.random
                    set_random_state(call.random)
                    with autocast_as(call.autocast), state_as(call.state):
                        output = call.forward(*args, **kwargs)
                    if group is not None:
                        group.record(again, output)
                    outputs.append([leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(output)])
                    if group is not None:
                        for leaf, tensor in enumerate(outputs[-1]):
                            if isinstance(tensor, Tensor):
                                group.results[id(tensor)] = Earlier(len(group.calls) - 1, leaf, False)
                                group.alive.append(tensor)
                    del output, args, kwargs
        except Finished:
            if group is not None and len(group.calls) < len(flat(group.schedule)):
                group.calls.append(again)
        if group is not None:
            group.close()
        if position < len(self.slots):
            raise Mistake(CHANGED)


def nothing() -> None:
    return None


def never(_: Any) -> Tensor:
    raise AssertionError("the graph of a replay is never run backward")


def unpack(slot: Slot) -> Tensor:
    while slot.value is None:
        slot.group.replay()
    value, slot.value = slot.value, None
    return value


def noted(forward: Callable[..., Any], number: int, given: tuple[Any, Any], group: Group, keep: bool = True) -> Call:
    """Write down a call about to happen with the given (args, kwargs)."""
    leaves, structure = tree_flatten(given)
    held: list[Tensor] = []
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            earlier = group.results.get(id(leaf))
            if earlier is None:
                held.append(leaf)
            leaves[position] = HELD if earlier is None else earlier._replace(requires_grad=leaf.requires_grad)
    if keep:
        with torch.enable_grad():
            node = Keep.apply(torch.empty(0, requires_grad=True), *held).grad_fn   # type: ignore[no-untyped-call]
        fetch = lambda: node.saved_tensors   # noqa: E731
    else:
        still = tuple(held)
        fetch = lambda: still   # noqa: E731
    kind = next((tensor.device.type for tensor in held), "cpu")
    return Call(forward, number, structure, leaves, fetch, random_state(), autocast_state(kind), [])


def arguments(call: Call, outputs: list[list[Any]]) -> tuple[Any, Any]:
    """The arguments of a call, with the tensors cut off from the graph they came from."""
    held = iter(call.held())
    leaves = []
    for leaf in call.leaves:
        if leaf is HELD:
            source = next(held)
            leaf = source.detach().requires_grad_(source.requires_grad)
        elif isinstance(leaf, Earlier):
            leaf = outputs[leaf.call][leaf.leaf].detach().requires_grad_(leaf.requires_grad)
        leaves.append(leaf)
    args, kwargs = tree_unflatten(leaves, call.structure)
    return args, kwargs


def random_state() -> tuple[Tensor, ...]:
    state = (torch.get_rng_state(),)
    return (*state, torch.cuda.get_rng_state()) if torch.cuda.is_available() and torch.cuda.is_initialized() else state


def set_random_state(state: tuple[Tensor, ...]) -> None:
    torch.set_rng_state(state[0])
    if len(state) > 1:
        torch.cuda.set_rng_state(state[1])


@contextmanager
def same_random_state() -> Iterator[None]:
    """The random state after is the one before."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


def autocast_state(kind: str) -> tuple[str, bool, torch.dtype, bool]:
    return kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()


def autocast_as(state: tuple[str, bool, torch.dtype, bool]) -> torch.autocast:
    kind, enabled, dtype, cached = state
    return torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached)


@contextmanager
def state_as(before: list[State]) -> Iterator[None]:
    """What changes has the values of the first time, and is changed only that once."""
    now = [(where, name, where.get(name, MISSING)) for where, name, _ in before]
    for where, name, value in before:
        put(where, name, copied(value))
    try:
        yield
    finally:
        for where, name, value in now:
            put(where, name, value)


def put(where: dict[str, Any], name: str, value: Any) -> None:
    if value is MISSING:
        where.pop(name, None)
    else:
        where[name] = value


def copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) else 0


class Recorder:
    """Wraps the blocks of a model for the time of one forward, so that they follow a schedule."""

    def __init__(self, blocks: Mapping[str, nn.Module], schedule: Schedule) -> None:
        self.blocks = list(blocks.values())
        self.group_of = {number: item for item in schedule if not isinstance(item, int) for number in flat(item)}
        self.changing: dict[int, list[tuple[dict[str, Any], str]]] = {}   # block -> what a call changes in its modules

    @contextmanager
    def around(self) -> Iterator[None]:
        self.open: Group | None = None
        self.last = -1
        with patched({block: self.wrapper(number, block) for number, block in enumerate(self.blocks)
                      if number in self.group_of}):
            try:
                yield
            finally:
                self.enter(None, -1)

    def enter(self, schedule: Schedule | None, number: int) -> Group | None:
        """The group for the next call: the open one if the call follows in it, else a new one."""
        follows = (self.open is not None and self.open.schedule is schedule and number == self.last + 1
                   and self.group_of.get(self.last) is schedule)
        if not follows:
            if self.open is not None:
                self.open.close()
            self.open = None if schedule is None else Group(schedule)
        self.last = number
        return self.open

    def wrapper(self, number: int, block: nn.Module) -> Callable[..., Any]:
        forward = block.forward

        def recorded(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            args, kwargs = without_caches(args), {name: without_caches(value) for name, value in kwargs.items()}
            group = self.enter(self.group_of[number], number)
            assert group is not None, "a block in a group has a group"
            call = noted(forward, number, (args, kwargs), group)
            there = {id(part.__dict__): set(part.__dict__) for part in block.modules()} if number not in self.changing else {}
            found = [(where, name, where.get(name, MISSING)) for where, name in self.state(number, block)]
            before = [(value, version(value)) for _, _, value in found]
            call.state = [(where, name, copied(value)) for where, name, value in found]
            with saved_tensors_hooks(group.pack, unpack):
                output = forward(*args, **kwargs)
            if number not in self.changing:
                call.state = [one for one, was in zip(call.state, before, strict=True) if changed(*one[:2], *was)]
                call.state += [(part.__dict__, name, MISSING) for part in block.modules() for name in part.__dict__
                               if name not in there[id(part.__dict__)]]
                self.changing[number] = [(where, name) for where, name, _ in call.state]
            group.record(call, output)
            return output

        return recorded

    def state(self, number: int, block: nn.Module) -> list[tuple[dict[str, Any], str]]:
        """What a call changes: buffers, and attributes that are tensors, numbers or nothing yet. Before the first call, all there are."""
        if number in self.changing:
            return self.changing[number]
        return [(where, name) for part in block.modules() for where in (part._buffers, part.__dict__) for name, value in where.items()
                if isinstance(value, (Tensor, int, float)) or (value is None and where is part.__dict__)]


def changed(where: dict[str, Any], name: str, value: Any, before: int) -> bool:
    return where.get(name, MISSING) is not value or version(value) != before or "running_mean" in where


def without_caches(value: Any) -> Any:
    """Key-value caches are for generating; one that is filled twice would be wrong, and training has no use for it."""
    if isinstance(value, tuple):
        return tuple(without_caches(item) for item in value)
    return None if type(value).__name__.endswith("Cache") else value


@contextmanager
def patched(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """The modules' forward replaced for a while."""
    before: dict[nn.Module, Any] = {module: module.__dict__.get("forward") for module in forwards}
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module, earlier in before.items():
            if earlier is None:
                del module.forward
            else:
                module.forward = earlier
