"""A walk through a model's forward that computes one worker's part of it: the user's own code runs, from its beginning.

    before the worker's blocks    nothing that depends on weights is computed: such tensors are `Absent` and have only a shape
    at its first block            the values that cross the cut are received
    its blocks                    are computed
    at the next worker's first    the values that cross that cut are the result, and the forward is left by an exception

Tensors that depend on no weight (masks, positions) are computed by every worker from its batch. Between blocks, values
that depend on weights are numbered as they come, (last called block, how many since), so all workers number a value
alike. A walk that computes nothing and runs to the end gives the `Chain`: the order of block calls, what crosses a cut
before each, and which weights each uses.

Contract: A stage runs the user's own forward, in which what is elsewhere is absent (decisions/017). A model is looked
at twice, on copies of all that it keeps: what differs from one time to the next is refused, and so is what other
workers would not see (tests/training/pipeline/partition/test_scratch.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoestring.core.errors import Mistake
from shoestring.core.model.absent import Absent, WritesAbsent, absent
from shoestring.core.private import (
    WRITE_COUNT,
    storage_id_of,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
    unwatched_by,
    without_modes,
)
from shoestring.measure.interception import instead, patch_forwards
from shoestring.training.pipeline.partition.scratch import scratch
from shoestring.training.pipeline.stages.block_output import BlockOutput, kind_of, recipe_of

Number = tuple[
    int, int
]  # of a value: the last block called before it was made (-1: none), and how many values were made since


@dataclass(frozen=True)
class Value:
    """A value that crosses a cut."""

    number: Number
    bytes: int  # with the traced batch
    gradient: bool  # whether a gradient comes back over the cut
    written: bool = False  # whether the model changes it in place later


@dataclass(frozen=True)
class Chain:
    """A model as a sequence of block calls."""

    calls: tuple[str, ...]  # names of the blocks, in the order in which they are called
    crossing: tuple[tuple[Value, ...], ...]  # before each call: values made earlier and used from there on
    weights: tuple[
        frozenset[str], ...
    ]  # weights used by each call and the code after it (by the first, the code before it too)
    buffers: tuple[frozenset[str], ...]  # the same for buffers
    counts: bool = False  # whether every forward changes a number or list that the model keeps outside of its blocks
    within: frozenset[int] = (
        frozenset()
    )  # calls from within a function with a backward of its own: no stage may begin with these
    changing: tuple[frozenset[str], ...] = ()  # per call: buffers and modules whose state the call changed
    keeping: tuple[frozenset[str], ...] = ()  # per call: buffers and modules of its block


# Attributes of a tensor other than its numbers: reading them does not count as a use
GETTERS: tuple[Any, ...] = (
    Tensor.device,
    Tensor.dtype,
    Tensor.shape,
    Tensor.layout,
    Tensor.ndim,
    Tensor.requires_grad,
    Tensor.is_leaf,
    Tensor.is_cuda,
    Tensor.is_cpu,
    Tensor.is_meta,
    Tensor.is_sparse,
    Tensor.nbytes,
    Tensor.itemsize,
    Tensor.is_nested,
    Tensor.is_quantized,
    WRITE_COUNT,
)
ABOUT_TENSORS: frozenset[Any] = frozenset(
    (
        *(getter.__get__ for getter in GETTERS),
        Tensor.size,
        Tensor.dim,
        Tensor.numel,
        Tensor.stride,
        Tensor.element_size,
        Tensor.is_floating_point,
        Tensor.is_complex,
        Tensor.is_contiguous,
        Tensor.get_device,
        Tensor.__len__,
        Tensor.storage_offset,
        Tensor.untyped_storage,
        torch.is_tensor,
        torch.is_floating_point,
        torch.numel,
    )
)


# Functions that draw random numbers. Outside of blocks, if independent of weights, all workers use the first worker's
# numbers
DRAWING: frozenset[Any] = frozenset(
    getattr(place, name)
    for place in (torch, Tensor, nn.functional)
    for name in (
        "rand",
        "randn",
        "randint",
        "randperm",
        "rand_like",
        "randn_like",
        "randint_like",
        "normal",
        "bernoulli",
        "multinomial",
        "poisson",
        "dropout",
        "alpha_dropout",
        "feature_dropout",
        "feature_alpha_dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "gumbel_softmax",
        "rrelu",
        "normal_",
        "uniform_",
        "bernoulli_",
        "random_",
        "exponential_",
        "geometric_",
        "cauchy_",
        "log_normal_",
    )
    if hasattr(place, name)
)


class PartComputed(BaseException):
    """Raised when this worker's part of a forward is computed."""


class Walk(TorchFunctionMode):
    """One forward. Inside `through`, blocks report to it, and as a torch function mode it sees what is computed between
    them."""

    def __init__(
        self, parts: ModelParts, own: range, bring: Callable[[Sequence[Tensor]], Sequence[Tensor]], whole: bool = False
    ) -> None:
        super().__init__()
        self.parts, self.own, self.bring = parts, own, bring
        self.whole = whole  # whether the forward runs on to its end after this worker's part
        chain = parts.chain
        first, last = own.start, own.stop
        self.takes = chain.crossing[first] if chain is not None and 0 < first < len(chain.crossing) else ()
        self.gives = chain.crossing[last] if chain is not None and last < len(chain.crossing) else ()
        self.awaited = {value.number for value in self.takes}
        self.wanted = {value.number for value in self.gives}
        self.call, self.count = -1, 0  # the last called block, and the number of values since
        self.here = first == 0 and len(own) > 0  # whether this worker computes the present code
        self.inside = False  # whether a block is running
        self.met = False  # whether a block computed here has met an absent tensor
        self.absents: dict[Number, Absent] = {}  # stand-ins for values to be received
        self.values: dict[Number, Tensor] = {}  # values that are here: received, or made here and needed later
        self.numbers: dict[int, tuple[Number, Any]] = {}  # id of a value made here -> its number and a weak reference
        self.drawn: set[Number] = set()  # random values that depend on no weight: all workers make them
        self.locals: dict[Number, Tensor] = {}  # those of them that were to be received
        self.thrown_away: set[int] = set()  # storages that blocks computed elsewhere write to
        self.token = object()  # identifies this forward: an absent tensor's number is valid in its own forward only

    # Code between blocks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in ABOUT_TENSORS:  # shapes, dtypes and the like are known everywhere
            return func(*args, **kwargs)
        if self.inside and self.here:
            if not has_absent(args, kwargs):
                return func(*args, **kwargs)
            self.met = True
            return func(*self.substitute_received(args), **self.substitute_received(kwargs))
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(map(self.depends, leaves)):
            return self.without_weights(func, args, kwargs, leaves)
        self.note_use(leaves)
        if self.here:
            return self.number_values(func(*self.substitute_received(args), **self.substitute_received(kwargs)))
        out = self.shapes_of_call(func, args, kwargs)
        return out if self.inside else self.number_values(out)

    def without_weights(self, func: Any, args: Any, kwargs: Any, leaves: list[Tensor]) -> Any:
        """Code that every worker computes. For random numbers, and values derived from them, all workers use those of
        one worker."""
        random = func in DRAWING and not self.inside
        if not random and all(self.number_of(leaf) is None for leaf in leaves):
            return func(*args, **kwargs)
        self.note_use(leaves)
        out = func(*args, **kwargs)
        return out if self.inside else self.number_values(out, drawn=True)

    def depends(self, leaf: Tensor) -> bool:
        """Whether a tensor depends on weights."""
        if isinstance(leaf, Absent) or id(leaf) in self.parts.hollow:
            return True
        number = self.number_of(leaf)
        return number is not None and number not in self.drawn

    def number_of(self, leaf: Tensor) -> Number | None:
        if isinstance(leaf, Absent):
            return leaf.number if leaf.forward is self.token else None
        found = self.numbers.get(id(leaf))
        return found[0] if found is not None and found[1]() is leaf else None

    def shapes_of_call(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call's result with shapes only. Modes that watch are off, since nothing is computed."""
        leaves, structure = tree_flatten((args, kwargs))
        given = tree_unflatten([self.parts.hollow.get(id(leaf), leaf) for leaf in leaves], structure)
        try:
            with without_modes():
                out = func(*given[0], **given[1])
            return tree_map(self.parts.weight_itself, out)
        except WritesAbsent as error:  # a write to a block's state, in a copy that is thrown away
            if not self.inside or storage_id_of(error.tensor) not in self.thrown_away:
                raise
            return kwargs.get("out", args[0] if args else None)

    def number_values(self, out: Any, given: Collection[int] = (), drawn: bool = False) -> Any:
        """Number the values that were made between blocks or by a block. An argument (`given`) that a block returns is
        not new."""
        for leaf in tree_leaves(out):
            if (
                isinstance(leaf, Tensor)
                and self.number_of(leaf) is None
                and id(leaf) not in self.parts.hollow
                and id(leaf) not in given
            ):
                number = self.call, self.count
                if drawn:
                    self.drawn.add(number)
                self.note(leaf, number)
                self.count += 1
        return out

    def note(self, leaf: Tensor, number: Number) -> None:
        if isinstance(leaf, Absent):
            leaf.number, leaf.forward = number, self.token
            if number in self.awaited:
                self.absents[number] = leaf
            return
        self.numbers[id(leaf)] = number, weakref.ref(leaf)
        if number in self.awaited:
            self.locals[number] = leaf
        if number in self.wanted:
            self.values[number] = leaf

    def substitute_received(self, given: Any) -> Any:
        """The arguments with absent tensors replaced by received values."""
        leaves, structure = tree_flatten(given)
        return tree_unflatten([self.real(leaf) if isinstance(leaf, Absent) else leaf for leaf in leaves], structure)

    def real(self, leaf: Absent) -> Tensor:
        if (number := self.number_of(leaf)) is None or number not in self.values:
            raise Mistake(
                f"the model uses something after {self.parts.name_of(self.call)} that an earlier block made, and when one "
                f"forward was looked at it did not: what its forward does must not depend on the step"
            )
        return self.values[number]

    def note_use(self, leaves: Iterable[Tensor]) -> None:
        """Called when values are used; ProbeWalk overrides it to record that."""

    # Blocks

    @contextmanager
    def through(self) -> Iterator[Walk]:
        """While inside, the model's forward follows this walk."""
        forwards = {
            block: instead(block, self.entering(number, block.forward))
            for number, block in enumerate(self.parts.blocks.values())
        }
        with patch_forwards(forwards), self:
            yield self

    def entering(self, number: int, inner: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.inside:
                return inner(*args, **kwargs)
            self.enter(number, (args, kwargs))
            if not self.here:
                given = {id(leaf) for leaf in tree_leaves((args, kwargs))}
                return self.number_values(self.elsewhere(number, inner, args, kwargs), given)
            here = self.substitute_received((args, kwargs))
            out = self.run_block(inner, *here)
            return self.number_values(out, {id(leaf) for leaf in tree_leaves(here)})

        return forward

    def run_block(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The result of a block of this worker. A block that met no absent tensor in its first call is not watched
        again, which saves time; if it meets one later, that is refused."""
        self.inside, self.met = True, False
        key = self.call, torch.is_grad_enabled()  # a validation may take another path
        quiet = key in self.parts.quiet
        try:
            with unwatched_by(self) if quiet else nullcontext():
                out = inner(*args, **kwargs)
        finally:
            self.inside = False
        if quiet and any(isinstance(leaf, Absent) for leaf in tree_leaves(out)):
            raise Mistake(
                f"{self.parts.name_of(self.call)} uses a value made earlier that is not among its arguments, and did "
                f"not do so the first time: a model that is cut into stages must do the same in every step"
            )
        if self.parts.chain is not None and not self.met:
            self.parts.quiet.add(key)
        return out

    def enter(self, block: int, given: Any) -> None:
        """A block is called."""
        call, chain = self.call + 1, self.parts.chain
        name = list(self.parts.blocks)[block]
        if chain is not None and (call >= len(chain.calls) or chain.calls[call] != name):
            raise Mistake(
                f"the model calls {name} now, and when one forward was looked at it called "
                f"{chain.calls[call] if call < len(chain.calls) else 'nothing'} there: a model that is cut into stages must call "
                f"its blocks in the same order every time (no layer drop, no early exit)"
            )
        self.call, self.count = call, 0
        if call == self.own.stop and len(self.own) and not self.whole:
            raise PartComputed
        if call == self.own.start and call:
            self.take()
        self.here = call in self.own
        self.note_use([leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)])

    def take(self) -> None:
        """Receive the values that cross the cut."""
        ours: dict[Number, Tensor] = {**self.absents, **self.locals}
        missing = [value for value in self.takes if value.number not in ours]
        if missing:
            raise Mistake(
                f"something that {self.parts.name_of(missing[0].number[0])} made when the forward was traced was not made "
                f"now: a model that is cut into stages must do the same in every step"
            )
        for value, arrived in zip(self.takes, self.bring([ours[value.number] for value in self.takes]), strict=True):
            if value.number in self.locals:  # holders of the numbers drawn here must see what the other workers use
                with torch.no_grad():
                    self.locals[value.number].copy_(arrived)
                continue
            self.values[value.number] = arrived
            self.numbers[id(arrived)] = value.number, weakref.ref(arrived)

    def result(self) -> list[Tensor]:
        """The values that cross the next cut."""
        missing = [value for value in self.gives if value.number not in self.values]
        if missing:
            raise Mistake(
                f"{self.parts.name_of(missing[0].number[0])} did not return what it returned when the forward was traced: "
                f"a model that is cut into stages must do the same in every step"
            )
        return [self.values[value.number] for value in self.gives]

    def forget(self) -> None:
        """The forward is over: drop all references."""
        for known in (self.values, self.absents, self.locals, self.numbers):
            known.clear()
        self.bring = nothing

    def elsewhere(self, number: int, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The absent result of a block that another worker computes. For shapes seen before, it is looked up."""
        leaves, _ = tree_flatten((args, kwargs))
        key = (number, tuple(map(kind_of, leaves)))
        known = self.parts.recipes.get(key)
        if known is not None:
            return known.again(leaves)
        out = self.output_shapes(number, inner, args, kwargs)
        given = {id(leaf) for leaf in leaves}
        made, shape = tree_flatten(out)
        out = tree_unflatten(
            [
                absent(leaf)
                if isinstance(leaf, Tensor) and not isinstance(leaf, Absent) and id(leaf) not in given
                else leaf
                for leaf in made
            ],
            shape,
        )
        if self.parts.chain is not None and (recipe := recipe_of(out, leaves)) is not None:
            self.parts.recipes[key] = recipe
        return out

    def output_shapes(self, number: int, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The shapes of a block's result, by running its own code without computing. The block's state stays as it
        was."""
        block = list(self.parts.blocks.values())[number]
        self.inside = True
        try:
            with scratch(block, self.parts.model) as self.thrown_away:
                return inner(*args, **kwargs)
        finally:
            self.inside, self.thrown_away = False, set()


def nothing(absents: Sequence[Tensor]) -> Sequence[Tensor]:
    """The `bring` function of a walk that receives nothing."""
    return ()


@dataclass
class ModelParts:
    """A model's blocks and weights as walks need them, and what walks have found out."""

    model: nn.Module
    blocks: Mapping[str, nn.Module]
    hollow: dict[int, Absent]  # id of a weight -> its stand-in where the weight is not here
    weights: dict[int, nn.Parameter]  # id of a stand-in -> its weight
    chain: Chain | None = None
    recipes: dict[Any, BlockOutput] = field(default_factory=dict)
    quiet: set[tuple[int, bool]] = field(default_factory=set)  # (call, with gradients) that met no absent tensor

    def weight_itself(self, leaf: Any) -> Any:
        """The weight behind a stand-in, where a function returns its argument."""
        return self.weights.get(id(leaf), leaf) if isinstance(leaf, Absent) else leaf

    def name_of(self, call: int) -> str:
        return "what comes before its blocks" if call < 0 or self.chain is None else self.chain.calls[call]


def parts_of(model: nn.Module, blocks: Mapping[str, nn.Module], gradients: bool = False) -> ModelParts:
    with without_modes():  # stand-ins have no memory, so memory counters must not see them
        hollow = {id(one): absent(one, gradient=gradients and one.requires_grad) for one in model.parameters()}
        return ModelParts(model, blocks, hollow, {id(hollow[id(one)]): one for one in model.parameters()})


def has_absent(args: Any, kwargs: Any) -> bool:
    for leaf in (*args, *kwargs.values()) if kwargs else args:
        if type(leaf) is Absent or (type(leaf) in (tuple, list) and has_absent(leaf, {})):
            return True
    return False
