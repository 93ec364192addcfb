"""A model as a chain of blocks: one forward and loss are traced, on shapes alone, to find what crosses every possible
cut."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoestring.core.batch import Batch, to_device
from shoestring.core.errors import Mistake
from shoestring.core.model.absent import Absent, absent
from shoestring.core.private import (
    has_backward_hooks,
    storage_id_of,
    tree_flatten,
    tree_leaves,
    tree_map,
    without_modes,
    write_count,
)
from shoestring.core.running import random_state
from shoestring.core.running.run import Run
from shoestring.core.user_code.foreign import attributes_of, container_kind, entries_of
from shoestring.training.pipeline.partition.gradient_flow import GradientFlow
from shoestring.training.pipeline.partition.scratch import BOOKS, PLAIN, scratch
from shoestring.training.pipeline.stages.walk import ABOUT_TENSORS, Chain, ModelParts, Number, Value, Walk, parts_of


class ProbeWalk(Walk):
    """A walk that computes nothing and records what each part of the model used."""

    def __init__(self, parts: ModelParts, model: nn.Module, thrown_away: set[int], again: bool) -> None:
        super().__init__(parts, range(0), lambda absents: ())
        self.names = {
            id(one): name for name, one in (*model.named_parameters(), *model.named_buffers())
        }  # of several modules that share a buffer, the first
        self.buffers = {id(one): one for one in model.buffers()}  # kept alive, so that their ids stay valid
        self.block_weights = [{self.names[id(one)] for one in block.parameters()} for block in parts.blocks.values()]
        self.block_buffers = [{self.names[id(one)] for one in block.buffers()} for block in parts.blocks.values()]
        self.modules = {id(one): name or "the model" for name, one in model.named_modules()}
        self.changing: dict[int, set[str]] = {}  # by call: modules and buffers whose state the call changed
        self.thrown_away, self.again = thrown_away, again
        self.called: list[int] = []
        self.last_use: dict[Number, int] = {}  # of each value: the last call in or after which it was used
        self.sizes: dict[Number, int] = {}  # of each value, in bytes
        self.memory: dict[int, list[tuple[Number, Tensor]]] = {}  # by storage: the values in it
        self.writes: set[tuple[int, int]] = set()  # (storage that was written to, last call before that)
        self.weights_used: dict[int, set[str]] = {}  # by call
        self.buffers_used: dict[int, set[str]] = {}
        self.buffers_written: dict[str, int] = {}  # buffers written outside of blocks: the last call before that
        self.given: set[int] = set()  # arguments of the running block
        self.flow: GradientFlow[Number] = GradientFlow()
        within = {part for block in parts.blocks.values() for part in block.modules()}
        self.outside = [part for part in model.modules() if part not in within]
        self.kept_outside = what_is_kept(self.outside)
        self.counters = counters_of(self.outside)
        self.counts = False  # whether the model changes a counter before its first block
        self.chance = other_generators()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ABOUT_TENSORS:
            return func(*args, **(kwargs or {}))
        leaves = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        buffers = {
            self.names[id(leaf)] for leaf in leaves if id(leaf) in self.buffers
        }  # also those that depend on no weight
        self.buffers_used.setdefault(max(self.call, 0), set()).update(buffers)
        if buffers and func in STATISTICS and keeps_statistics(func, args, kwargs or {}):
            self.changing.setdefault(max(self.call, 0), set()).update(buffers)
        if func in NUMBERS and not self.inside and any(self.number_of(leaf) in self.drawn for leaf in leaves):
            raise Mistake(
                f"after {self.parts.name_of(self.call)} the model takes a random number out of its tensor, outside of its "
                f"blocks, and every worker draws another one: leave it in the tensor, or do that inside of a block"
            )
        before = [write_count(leaf) for leaf in leaves]
        out = super().__torch_function__(func, types, args, kwargs)
        for leaf, count in zip(leaves, before, strict=True):
            if id(leaf) in self.buffers and write_count(leaf) != count and not self.inside:
                self.buffers_written[self.names[id(leaf)]] = max(self.call, 0)
        self.writes |= {
            (storage_id_of(leaf.shaped), self.call)
            for leaf, count in zip(leaves, before, strict=True)
            if isinstance(leaf, Absent) and write_count(leaf) != count
        }
        if self.inside:
            for leaf in tree_leaves(out):
                if isinstance(leaf, Absent) and leaf.maker < 0 and leaf.number is None:
                    leaf.maker = self.called[-1]
        return out

    def note_use(self, leaves: Iterable[Tensor]) -> None:
        for leaf in leaves:
            if (number := self.number_of(leaf)) is not None:
                if self.inside and id(leaf) not in self.given:
                    self.check_maker(leaf)
                self.last_use[number] = max(self.call, self.last_use.get(number, -1))
                self.flow.note_use(number, leaf)
            elif isinstance(leaf, Absent):
                self.check_origin(leaf)
            elif id(leaf) in self.parts.hollow:
                self.weights_used.setdefault(max(self.call, 0), set()).add(self.names[id(leaf)])

    def check_origin(self, leaf: Absent) -> None:
        """Refuse a tensor from an earlier forward, which can't be sent to another worker."""
        if leaf.number is not None:
            raise Mistake(
                f"after {self.name()} the model uses a tensor that an earlier forward left, and it may be another worker's: let "
                f"a forward begin from its batch and weights alone"
            )
        self.check_maker(leaf)

    def check_maker(self, leaf: Tensor) -> None:
        if isinstance(leaf, Absent) and (not self.inside or leaf.maker not in (-1, self.called[-1])):
            whose = "a block" if leaf.maker < 0 else list(self.parts.blocks)[leaf.maker]
            raise Mistake(
                f"{'in' if self.inside else 'after'} {self.name()} the model uses a tensor that {whose} gave in an object which "
                f"nobody can look into, or left somewhere (hooks inside of blocks collect it, as for output_attentions=True in models of "
                f"transformers): let blocks return tensors, in tuples, lists and dicts, or use a plan that does not cut the model"
            )

    def name(self) -> str:
        return list(self.parts.blocks)[self.called[-1]] if self.called else "what comes before its blocks"

    def note(self, leaf: Tensor, number: Number) -> None:
        super().note(leaf, number)
        self.sizes[number] = leaf.nbytes
        shown = leaf.shaped if isinstance(leaf, Absent) else leaf
        if not shown.is_sparse:
            self.memory.setdefault(storage_id_of(shown), []).append(
                (number, shown)
            )  # kept alive, so that its id stays valid
        self.flow.note(number, leaf)
        if leaf.requires_grad and leaf.grad_fn is not None:
            leaf.register_hook(self.refuse_derivative)

    def refuse_derivative(self, gradient: Tensor) -> None:
        raise Mistake("its forward computes derivatives, which go through blocks that other workers compute")

    def enter(self, block: int, given: Any) -> None:
        self.check_outside()
        self.flow.note_cut()
        super().enter(block, given)
        self.called.append(block)
        self.given = {id(leaf) for leaf in tree_leaves(given)}

    def check_outside(self) -> None:
        """Refuse code between blocks that has effects which not every worker would see."""
        if other_generators() != self.chance:
            raise Mistake(
                f"after {self.name()} the model draws from Python's or NumPy's random numbers, outside of its blocks, and every "
                f"worker draws others: draw with torch, or inside of a block"
            )
        kept = what_is_kept(self.outside)
        if (
            kept != self.kept_outside and self.called and self.again
        ):  # a value that is only set, to the same every time, does no harm
            raise Mistake(
                f"after {self.name()} the model keeps something else than before, outside of its blocks, and workers whose part "
                f"ends earlier do not see that: do it before the first block, or inside of one"
            )
        self.counts |= self.again and counters_of(self.outside) != self.counters
        self.kept_outside = kept

    def output_shapes(self, number: int, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        name = list(self.parts.blocks)[number]
        leaves, structure = tree_flatten((args, kwargs))
        before = [
            (leaf, write_count(leaf)) for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, Absent)
        ]
        block = self.parts.blocks[name]
        kept = self.block_state(block, name)
        self.inside = True
        try:
            out = inner(*args, **kwargs)
        finally:
            self.inside = False
        self.changing.setdefault(self.call, set()).update(
            key for key, now in self.block_state(block, name).items() if now != kept.get(key)
        )
        leave_absent(block, number)
        now, after = tree_flatten((args, kwargs))
        if after != structure or any(one is not other for one, other in zip(leaves, now, strict=True)):
            raise Mistake(
                f"{name} changes a list or dict that it is given, which other workers would not see: let it return what it adds"
            )
        if any(write_count(leaf) != count for leaf, count in before):
            raise Mistake(
                f"{name} writes to a tensor that it is given and that no weight is in, which other workers would not see: let "
                f"it compute a new one"
            )
        self.chance = other_generators()
        return out

    def block_state(self, block: nn.Module, name: str) -> dict[str, Any]:
        """A block's state, by the names of its buffers and modules. If a module only sets a value, to the same every
        time, no other block misses it; but the block itself may behave differently once it is set, so the first trace
        records it under the block's name."""
        return {
            **{self.names[id(one)]: content(one) for one in block.buffers() if id(one) in self.names},
            **{
                self.modules[id(one)] if self.again else f"{self.modules[id(one)]} ({name})": what_is_kept([one])
                + buffers_of(one)
                for one in block.modules()
                if id(one) in self.modules
            },
        }


NUMBERS = frozenset((Tensor.item, Tensor.tolist, Tensor.__float__, Tensor.__int__, Tensor.__index__, Tensor.numpy))

STATISTICS = frozenset((nn.functional.batch_norm, torch.batch_norm, nn.functional.instance_norm, torch.instance_norm))


def keeps_statistics(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a norm updates the statistics that it is given, which its kernel does without raising a version
    counter."""
    usual = func is nn.functional.instance_norm
    return bool(args[5] if len(args) > 5 else kwargs.get("training", kwargs.get("use_input_stats", usual)))


def what_is_kept(modules: Iterable[nn.Module]) -> list[Any]:
    """A value that differs when attributes of modules have changed; absent tensors are ignored."""
    return [
        (name, *content(value)) for module in modules for name, value in module.__dict__.items() if name not in BOOKS
    ]


def leave_absent(block: nn.Module, number: int) -> None:
    """Remove what a block keeps of a call from view: a worker that does not compute the block does not have it. Other
    modules that use it are refused by the tensor's maker, even if the block returned the same tensor."""

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, Absent):
            return leaf
        found = absent(leaf, leaf.device)
        found.maker = number
        return found

    with without_modes():
        for module in block.modules():
            for name, value in module.__dict__.items():
                if name not in BOOKS and any(isinstance(leaf, Absent) for leaf in tree_leaves(value)):
                    module.__dict__[name] = tree_map(own, value)


def counters_of(modules: Iterable[nn.Module]) -> list[Any]:
    """Plain values and container sizes among the attributes of modules: possible counters of a forward."""
    return [
        (name, value if type(value) in PLAIN else len(entries_of(value)))
        for module in modules
        for name, value in module.__dict__.items()
        if name not in BOOKS and (type(value) in PLAIN or container_kind(value))
    ]


def buffers_of(module: nn.Module) -> list[Any]:
    return [id(one) for one in module.buffers(recurse=False)]


def content(value: Any) -> tuple[Any, ...]:
    if isinstance(value, Tensor):
        return () if isinstance(value, Absent) else (id(value), write_count(value))
    if type(value) in PLAIN:
        return (value,)
    inside = entries_of(value) or list((attributes_of(value) or {} if not isinstance(value, nn.Module) else {}).items())
    return (
        id(value),
        len(inside),
        *(
            repr(one) if type(one) in PLAIN else id(one) if not isinstance(one, Absent) else ""
            for item in inside
            for one in (item if type(item) is tuple else (item,))
        ),
    )


def other_generators() -> Any:
    """The states of random generators other than torch's."""
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), kind, np.array(keys).tobytes(), rest


def chain_of(run: Run, batch: Batch | None = None) -> Chain:
    """The chain of a run's model, traced with a typical batch. If the model can't be cut, the error says where and
    why."""
    with without_modes(), random_state.fork_rng():  # the trace is no part of training
        if batch is None:
            if run.example is None:
                raise Mistake("nobody gave a batch to look at the model with")
            batch = run.example()
        device = next(run.model.parameters()).device
        check_hooks(run)
        first = run.cuts.slices(run, to_device(batch, device))[0]
        with first.within(), scratch(run.model, run.model) as thrown_away:
            chain = trace_chain(run, first.batch, thrown_away, again=False)
            again = trace_chain(run, first.batch, thrown_away, again=True)
            changing = tuple(one | other for one, other in zip(chain.changing, again.changing, strict=False))
            if again != replace(chain, counts=again.counts, changing=again.changing, keeping=again.keeping):
                raise Mistake(
                    "the model can't be cut into stages: its forward was looked at twice, and did something else the second "
                    "time; what it does must not depend on the step or on chance (no layer drop, no early exit)"
                )
        return replace(again, changing=changing, keeping=tuple(map(frozenset.union, chain.keeping, again.keeping)))


def check_hooks(run: Run) -> None:
    """Refuse backward hooks on modules that span stages, because no worker computes all of their backward, and on
    blocks themselves: torch runs a module's hooks around its forward, also at workers that compute nothing there."""
    blocks = set(map(id, run.blocks.values()))
    within = {id(part) for block in run.blocks.values() for part in block.modules() if part is not block}
    for name, module in run.model.named_modules():
        if id(module) not in within and has_backward_hooks(module):
            why = (
                "it is a block, which all workers call and one computes"
                if id(module) in blocks
                else "no worker runs all of its backward"
            )
            raise Mistake(
                f"the model can't be cut into stages: {name or 'the model'} has a backward hook, but {why}; put it on a "
                f"module inside of a block"
            )


def trace_chain(run: Run, batch: Batch, thrown_away: set[int], again: bool) -> Chain:
    walk = ProbeWalk(parts_of(run.model, run.blocks, gradients=True), run.model, thrown_away, again)
    try:
        with torch.enable_grad(), walk.through():
            loss = run.loss(run.forward(run.model, batch), batch)
            walk.check_outside()
    except Mistake as error:
        raise Mistake(f"the model can't be cut into stages: {error}") from error
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise Mistake(
            f"the model can't be cut into stages: when its forward was looked at without computing it, it failed in or after "
            f"{walk.name()} ({type(error).__name__}: {first})"
        ) from error
    return chain_from_walk(walk, run.blocks, loss)


def chain_from_walk(walk: ProbeWalk, blocks: Mapping[str, nn.Module], loss: object) -> Chain:
    names = list(blocks)
    if len(walk.called) < 2:
        raise Mistake(
            f"the model can't be cut into stages: its forward calls {len(walk.called)} of its blocks "
            f"({', '.join(names) or 'none'}), and a cut lies between two"
        )
    written = late_changes(walk)
    if isinstance(loss, Tensor) and (number := walk.number_of(loss)) is not None:
        walk.flow.note_use(number, loss)
    reached = walk.flow.values_with_gradient(loss)
    crossing = [
        tuple(
            Value(number, walk.sizes[number], number in reached[call], number in written)
            for number, use in sorted(walk.last_use.items())
            if number[0] < call <= use
        )
        for call in range(len(walk.called))
    ]
    own, kept = (
        [walk.block_weights[block] for block in walk.called],
        [walk.block_buffers[block] for block in walk.called],
    )
    for name, call in walk.buffers_written.items():
        if any(name in used for earlier, used in walk.buffers_used.items() if earlier < call):
            raise Mistake(
                f"the model can't be cut into stages: after {names[walk.called[call]]} it writes to the buffer {name}, outside "
                f"of its blocks, and uses it before: workers whose part ends earlier do not see that; do it inside of a block"
            )
    keeping = [frozenset(walk.block_state(blocks[names[block]], names[block])) for block in walk.called]
    return Chain(
        tuple(names[block] for block in walk.called),
        ((), *crossing[1:]),
        tuple(frozenset(own[call] | walk.weights_used.get(call, set())) for call in range(len(own))),
        tuple(frozenset(kept[call] | walk.buffers_used.get(call, set())) for call in range(len(own))),
        walk.counts or bool(walk.buffers_written),
        frozenset(walk.flow.within),
        tuple(frozenset(walk.changing.get(call, set())) for call in range(len(own))),
        tuple(keeping),
    )


def late_changes(walk: ProbeWalk) -> set[Number]:
    """The values that are changed in place after a block that was called after they were made."""
    found = set()
    for storage, call in walk.writes:
        later = {
            number for number, _ in walk.memory.get(storage, ()) if number[0] < call <= walk.last_use.get(number, -1)
        }
        if len(later) > 1:
            raise Mistake(
                f"the model can't be cut into stages: in or after {list(walk.parts.blocks)[walk.called[call]]} it changes a "
                f"tensor in place that was made before and of which it uses another view too: workers would change one of them; "
                f"compute a new tensor instead"
            )
        found |= later
    return found
