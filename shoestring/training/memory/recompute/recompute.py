"""The recomputation engine: blocks drop what they saved for backward and recompute it when backward needs it, without
changing the model.

The user's forward runs unchanged. While a block of a segment runs, every tensor that autograd saves is replaced by an
empty slot, and the call (its arguments, random state, the block's own state) is recorded. When backward unpacks a slot,
the calls of its segment are replayed and fill all slots of the segment. A segment may contain segments: during the
replay, their slots are handed to a new inner segment instead of being filled, which is a checkpoint within a
checkpoint.
A replayed call finds the block's state as it was the first time (block_state.py), and all global random generators too.
State that can't be restored is detected: backward uses nothing but the contents of the slots, so these are compared
with the dropped tensors by fingerprint: all of them in a block's first call, one tensor per call later. A difference
ends the training with a message.

    schedule (0, (1, 2), (3, (4, 5), 6))     0 keeps everything; 1 and 2 are recomputed together;
                                             3 to 6 too, and during that 4 and 5 are dropped once more

An argument that is a result of an earlier call of the same segment is not held; the replay produces it again.

Contract: A difference is a message, never other weights (tests/training/memory/recompute/test_recompute.py, decisions/012).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shoestring.core.errors import Mistake, NotRepeatable
from shoestring.core.private import storage_id_of, tree_flatten, tree_leaves, tree_unflatten
from shoestring.core.running import random_state
from shoestring.core.user_code.seams import repeats_user
from shoestring.measure.calls import without_caches
from shoestring.measure.interception import patch_forwards
from shoestring.training.memory.recompute.block_state import BlockState, Frozen, check_saving, version
from shoestring.training.memory.recompute.fingerprint import Fingerprint, fingerprint, matches

Schedule = tuple[Any, ...]  # of block numbers and nested schedules


def flat(schedule: Schedule) -> list[int]:
    """The block numbers of a schedule, in order.

    >>> flat((0, (1, 2), (3, (4, 5), 6)))
    [0, 1, 2, 3, 4, 5, 6]
    """
    return [number for item in schedule for number in ([item] if isinstance(item, int) else flat(item))]


class EarlierResult(NamedTuple):
    """An argument that is the result of an earlier call of the segment."""

    call: int
    leaf: int
    requires_grad: bool


HELD = object()  # marks an argument that the call holds itself
CHANGED = (
    "the block {} of the model computes something else when it runs again on the same input: it keeps something from one "
    "call to the next where nobody else can see it, such as a cache, a counter or a random generator outside of the block, so it "
    "can't be recomputed; keep that in an attribute of the block, switch it off (use_cache=False in models of transformers), or use "
    "a plan without Checkpoint and OffloadModel"
)
OVERWRITES = (
    "the block {} changes its input in place, so it can't be recomputed from its original input; write it without that "
    "(inplace=False), or use a plan without Checkpoint and OffloadModel"
)


DIFFERENTIATED = (
    "the job differentiates a backward (create_graph=True, for a gradient penalty, say), which needs the weights of blocks after "
    "they have left memory: use a plan without OffloadModel"
)


class TensorSlot:
    """Stands in the autograd graph for a tensor that was dropped."""

    def __init__(self, segment: Segment, tensor: Tensor) -> None:
        self.segment = segment
        self.kind = (tensor.shape, tensor.dtype)
        self.print: Fingerprint = None
        self.sampled = False  # whether the fingerprint covers a few numbers only
        self.value: Tensor | None = None

    def remember(self, tensor: Tensor, sampled: bool) -> None:
        """Have the recomputed tensor compared with this one."""
        self.print, self.sampled = fingerprint(tensor, sampled), sampled

    def takes(self, tensor: Tensor) -> bool:
        """Whether a tensor can be the one that was dropped."""
        return self.kind == (tensor.shape, tensor.dtype) and matches(self.print, tensor, self.sampled)


class SlotsFilled(Exception):
    """All slots are filled: the rest of the replay is not needed."""


class HoldTensors(torch.autograd.Function):
    """Holds tensors as autograd does, so that saved-tensor hooks around this one (OffloadActivations) see them too."""

    @staticmethod
    def forward(ctx: Any, hook: Tensor, *held: Tensor) -> Tensor:
        ctx.save_for_backward(*held)
        return hook.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise AssertionError("this node only holds tensors; nothing flows through it")


@dataclass
class BlockCall:
    forward: Callable[..., Any]
    number: int  # the block's number
    name: str
    structure: Any  # tree structure of (args, kwargs)
    leaves: list[Any]  # leaves of (args, kwargs), with tensors replaced by HELD or Earlier
    held: Callable[[], tuple[Tensor, ...]]
    random: random_state.State
    autocast: tuple[str, bool, torch.dtype, bool]
    state: BlockState
    picture: list[Frozen]  # the block's state before the call


@dataclass
class Segment:
    schedule: Schedule
    calls: list[BlockCall] = field(default_factory=list)
    slots: list[Callable[[], TensorSlot | None]] = field(default_factory=list)
    results: dict[int, EarlierResult] = field(default_factory=dict)  # tensor id -> its producer, while recording
    alive: list[Any] = field(default_factory=list)  # keeps those ids valid while recording

    def pack(self, tensor: Tensor) -> TensorSlot:
        slot = TensorSlot(self, tensor)
        self.slots.append(weakref.ref(slot))
        return slot

    def adopt(self, slot: TensorSlot | None) -> None:
        """Take over a slot of the enclosing segment."""
        if slot is not None:
            slot.segment = self
        self.slots.append(weakref.ref(slot) if slot is not None else nothing)

    def record(self, call: BlockCall, output: Any) -> None:
        self.calls.append(call)
        for leaf, tensor in enumerate(tree_leaves(output)):
            if isinstance(tensor, Tensor):
                self.results[id(tensor)] = EarlierResult(len(self.calls) - 1, leaf, tensor.requires_grad)
                self.alive.append(tensor)

    def close(self) -> None:
        self.results.clear()
        self.alive.clear()

    def inner_groups(self) -> dict[int, Schedule]:
        """Call -> the inner schedule it belongs to; empty if the calls did not come in the planned order."""
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

    @repeats_user
    def replay(self) -> None:
        """Run the calls again and fill the slots, or hand them on to inner segments."""
        inner = self.inner_groups()
        position = 0
        segment: Segment | None = None

        def store(tensor: Tensor) -> None:
            nonlocal position
            slot = self.slots[position]()
            if slot is not None and not slot.takes(tensor):
                raise NotRepeatable(CHANGED.format(call.name))
            if segment is not None:
                segment.adopt(slot)
            elif slot is not None:
                slot.value = tensor.detach()
            position += 1
            if position == len(self.slots):
                raise SlotsFilled

        outputs: list[list[Any]] = []
        try:
            with torch.enable_grad(), random_state.fork_rng(), saved_tensors_hooks(store, never):
                for index, call in enumerate(self.calls):
                    args, kwargs = arguments(call, outputs)
                    begins = index in inner and (index == 0 or inner.get(index - 1) is not inner[index])
                    if segment is not None and (begins or index not in inner):
                        segment.close()
                        segment = None
                    if begins:
                        segment = Segment(inner[index])
                    if segment is not None:
                        again = record_replayed(call, (args, kwargs), segment)
                    random_state.restore(call.random)
                    with autocast_as(call.autocast), call.state.as_in(call.picture):
                        output = call.forward(*args, **kwargs)
                    if segment is not None:
                        segment.record(again, output)
                    outputs.append(
                        [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(output)]
                    )
                    if segment is not None:
                        for leaf, tensor in enumerate(outputs[-1]):
                            if isinstance(tensor, Tensor):
                                segment.results[id(tensor)] = EarlierResult(len(segment.calls) - 1, leaf, False)
                                segment.alive.append(tensor)
                    del output, args, kwargs
        except SlotsFilled:
            if segment is not None and len(segment.calls) < len(flat(segment.schedule)):
                segment.calls.append(again)
        if segment is not None:
            segment.close()
        if position < len(self.slots):
            raise NotRepeatable(CHANGED.format(self.calls[-1].name))


def nothing() -> None:
    return None


def never(_: Any) -> Tensor:
    raise AssertionError("the graph of a replay is never run backward")


def unpack(slot: TensorSlot) -> Tensor:
    while slot.value is None:
        slot.segment.replay()
    value, slot.value = slot.value, None
    return value


def unpack_leaving(slot: TensorSlot) -> Tensor:
    """The same, where a block's weights leave memory after its backward. A backward that is differentiated itself would
    keep them in its graph, where the numbers of another block would take their place."""
    if torch.is_grad_enabled():
        raise Mistake(DIFFERENTIATED)
    return unpack(slot)


def reference_arguments(given: tuple[Any, Any], segment: Segment) -> tuple[Any, list[Any], list[Tensor]]:
    """The tree structure of (args, kwargs), its leaves with tensors replaced by references, and the tensors to hold."""
    leaves, structure = tree_flatten(given)
    held: list[Tensor] = []
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            earlier = segment.results.get(id(leaf))
            if earlier is None:
                held.append(leaf)
            leaves[position] = HELD if earlier is None else earlier._replace(requires_grad=leaf.requires_grad)
    return structure, leaves, held


def record_replayed(call: BlockCall, given: tuple[Any, Any], segment: Segment) -> BlockCall:
    """A replayed call, recorded in an inner segment with the arguments it has there."""
    structure, leaves, held = reference_arguments(given, segment)
    return replace(call, structure=structure, leaves=leaves, held=lambda: tuple(held))


def arguments(call: BlockCall, outputs: list[list[Any]]) -> tuple[Any, Any]:
    """The arguments of a call, detached from the graph they came from."""
    held = iter(call.held())
    leaves = []
    for leaf in call.leaves:
        if leaf is HELD:
            source = next(held)
            leaf = source.detach().requires_grad_(source.requires_grad)
        elif isinstance(leaf, EarlierResult):
            leaf = outputs[leaf.call][leaf.leaf].detach().requires_grad_(leaf.requires_grad)
        leaves.append(leaf)
    args, kwargs = tree_unflatten(leaves, call.structure)
    return args, kwargs


def autocast_state(kind: str) -> tuple[str, bool, torch.dtype, bool]:
    return kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()


def autocast_as(state: tuple[str, bool, torch.dtype, bool]) -> torch.autocast:
    kind, enabled, dtype, cached = state
    return torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached)


class BlockRecorder:
    """Wraps the blocks of a model during one forward, so that they follow a schedule."""

    def __init__(self, blocks: Mapping[str, nn.Module], schedule: Schedule, leaving: bool = False) -> None:
        self.unpack = unpack_leaving if leaving else unpack  # leaving: whether weights leave memory after their use
        self.names = list(blocks)
        self.blocks = list(blocks.values())
        self.segment_of = {number: item for item in schedule if not isinstance(item, int) for number in flat(item)}
        self.watched: dict[
            int, int
        ] = {}  # block -> index of the saved tensor that is compared in every call; empty before the first call
        self.random: random_state.State | None = None  # before the last call
        self.states: dict[int, BlockState] = {}

    @contextmanager
    def around(self) -> Iterator[None]:
        self.open: Segment | None = None
        self.last = -1
        with patch_forwards(
            {
                block: self.wrapper(number, block)
                for number, block in enumerate(self.blocks)
                if number in self.segment_of
            }
        ):
            try:
                yield
            finally:
                self.enter(None, -1)

    def enter(self, schedule: Schedule | None, number: int) -> Segment | None:
        """The segment for the next call: the open one if the schedule continues in it, else a new one."""
        follows = (
            self.open is not None
            and self.open.schedule is schedule
            and number == self.last + 1
            and self.segment_of.get(self.last) is schedule
        )
        if not follows:
            if self.open is not None:
                self.open.close()
            self.open = None if schedule is None else Segment(schedule)
        self.last = number
        return self.open

    def wrapper(self, number: int, block: nn.Module) -> Callable[..., Any]:
        forward, state = block.forward, self.states.setdefault(number, BlockState(block))

        def record_call(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            check_saving("Checkpoint and OffloadModel", (args, kwargs))
            args, kwargs = without_caches(args), {name: without_caches(value) for name, value in kwargs.items()}
            segment = self.enter(self.segment_of[number], number)
            assert segment is not None, "a block with a schedule is in a segment"
            given = [(leaf, version(leaf)) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            call = self.call(forward, number, (args, kwargs), segment, state)
            with saved_tensors_hooks(self.packing(number, block, segment), self.unpack):
                output = forward(*args, **kwargs)
            if any(version(leaf) != before for leaf, before in given):
                raise NotRepeatable(OVERWRITES.format(self.names[number]))
            segment.record(call, output)
            return output

        return record_call

    def call(
        self, forward: Callable[..., Any], number: int, given: tuple[Any, Any], segment: Segment, state: BlockState
    ) -> BlockCall:
        """Record a call that is about to happen."""
        structure, leaves, held = reference_arguments(given, segment)
        with torch.enable_grad():
            kept = HoldTensors.apply(torch.empty(0, requires_grad=True), *held)  # type: ignore[no-untyped-call]
        now = random_state.state()
        if self.random is not None and now["python"] == self.random["python"]:  # share it: 20 KB, rarely changed
            now["python"] = self.random["python"]
        self.random = now
        kind = next((tensor.device.type for tensor in held), "cpu")
        return BlockCall(
            forward,
            number,
            self.names[number],
            structure,
            leaves,
            lambda: kept.grad_fn.saved_tensors,
            now,
            autocast_state(kind),
            state,
            state.picture(),
        )

    def packing(self, number: int, block: nn.Module, segment: Segment) -> Callable[[Tensor], TensorSlot]:
        """The pack hook: compares all saved tensors but weights in a block's first call, and only the last of them
        later."""
        weights = {storage_id_of(parameter) for parameter in block.parameters()}
        first, last = number not in self.watched, self.watched.get(number)
        position = 0

        def pack(tensor: Tensor) -> TensorSlot:
            nonlocal position
            slot = segment.pack(tensor)
            if first or position == last:
                slot.remember(tensor, sampled=not first)
            if first and (tensor.layout is not torch.strided or storage_id_of(tensor) not in weights):
                self.watched[number] = position
            position += 1
            return slot

        return pack
