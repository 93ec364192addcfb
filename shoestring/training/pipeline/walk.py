"""A walk through a model's forward of which one worker computes a part: the user's own code runs, from its beginning.

    before the worker's blocks    nothing that depends on weights is computed: it is `Absent`, and has its shape
    at its first block            what crosses the cut is received
    its blocks                    are computed
    at the next worker's first    what crosses that cut is the result, and the forward is left

What depends on no weight (masks, positions) is computed by every worker from its batch. Between blocks, values that depend on weights are
numbered as they come, (block that was called last, how many since), so all workers call a value the same. A walk that computes nothing and
never leaves gives the `Chain`: which blocks are called in which order, what crosses a cut before each, and whose weights are used where.

Contract: A stage runs the user's own forward, in which what is elsewhere is absent (decisions/017). A model is looked
at twice, on copies of all that it keeps: what differs from one time to the next is refused, and so is what other
workers would not see (tests/training/pipeline/test_scratch.py).
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

from shoestring.core.absent import Absent, WritesAbsent, absent
from shoestring.core.errors import Mistake
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
from shoestring.measure.interception import instead, patched
from shoestring.training.pipeline.scratch import scratch

Number = tuple[
    int, int
]  # of a value: the last block that was called before it came (-1: none), and how many came since


@dataclass(frozen=True)
class Value:
    """What crosses a cut."""

    number: Number
    bytes: int  # with the batch that was looked at
    gradient: bool  # whether a gradient comes back over the cut
    written: bool = False  # the model changes it in place later


@dataclass(frozen=True)
class Chain:
    """A model as one block after the other."""

    calls: tuple[str, ...]  # the blocks' names, in the order in which they are called
    crossing: tuple[tuple[Value, ...], ...]  # before each call: what is used from there on and was made before
    weights: tuple[
        frozenset[str], ...
    ]  # of each call and what follows it until the next (of the first, what comes before too)
    buffers: tuple[frozenset[str], ...]  # the same of numbers that are kept beside weights
    counts: bool = False  # every forward changes a number or a list that the model keeps outside of its blocks
    within: frozenset[int] = (
        frozenset()
    )  # calls from within a function with a backward of its own: no stage begins with these
    changing: tuple[
        frozenset[str], ...
    ] = ()  # of each call: buffers and modules that keep something else after it than before
    keeping: tuple[frozenset[str], ...] = ()  # of each call: buffers and modules that its block has


# What a tensor is, but for its numbers: asking for it uses nothing
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


# What draws random numbers. Where that depends on no weight and happens outside of blocks, all workers draw, and use what the first drew
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
    """The part of a forward that this worker computes is done."""


class Walk(TorchFunctionMode):
    """One forward. Inside `through` blocks report to it; while it is active it sees what is computed between them."""

    def __init__(
        self, parts: ModelParts, own: range, bring: Callable[[Sequence[Tensor]], Sequence[Tensor]], whole: bool = False
    ) -> None:
        super().__init__()
        self.parts, self.own, self.bring = parts, own, bring
        self.whole = whole  # it goes on to the end when its own part is done
        chain = parts.chain
        first, last = own.start, own.stop
        self.takes = chain.crossing[first] if chain is not None and 0 < first < len(chain.crossing) else ()
        self.gives = chain.crossing[last] if chain is not None and last < len(chain.crossing) else ()
        self.awaited = {value.number for value in self.takes}
        self.wanted = {value.number for value in self.gives}
        self.call, self.count = -1, 0  # the last block that was called, and values since
        self.here = first == 0 and len(own) > 0  # what is computed now is computed by this worker
        self.inside = False  # in a block
        self.met = False  # something absent, in a block that is computed here
        self.absents: dict[Number, Absent] = {}  # that were awaited, when they came
        self.values: dict[Number, Tensor] = {}  # that are here: received, or made here and wanted
        self.numbers: dict[int, tuple[Number, Any]] = {}  # of values that were made here, by id, with a weak reference
        self.drawn: set[Number] = set()  # those that depend on no weight and on random numbers: all workers make them
        self.locals: dict[Number, Tensor] = {}  # of these, that were awaited
        self.thrown_away: set[int] = set()  # storages of what a block writes to that is not computed here
        self.token = object()  # an absent tensor of another forward has a number, which means nothing here

    # What happens between blocks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in ABOUT_TENSORS:  # what is no number of a tensor is known everywhere
            return func(*args, **kwargs)
        if self.inside and self.here:
            if not has_absent(args, kwargs):
                return func(*args, **kwargs)
            self.met = True
            return func(*self.brought(args), **self.brought(kwargs))
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(map(self.depends, leaves)):
            return self.without_weights(func, args, kwargs, leaves)
        self.used(leaves)
        if self.here:
            return self.numbered(func(*self.brought(args), **self.brought(kwargs)))
        out = self.shaped(func, args, kwargs)
        return out if self.inside else self.numbered(out)

    def without_weights(self, func: Any, args: Any, kwargs: Any, leaves: list[Tensor]) -> Any:
        """What every worker computes. Of random numbers, and what follows from them, all use those of one worker."""
        random = func in DRAWING and not self.inside
        if not random and all(self.number_of(leaf) is None for leaf in leaves):
            return func(*args, **kwargs)
        self.used(leaves)
        out = func(*args, **kwargs)
        return out if self.inside else self.numbered(out, drawn=True)

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

    def shaped(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a call would give, without its numbers. Nobody watches: nothing is computed."""
        leaves, structure = tree_flatten((args, kwargs))
        given = tree_unflatten([self.parts.hollow.get(id(leaf), leaf) for leaf in leaves], structure)
        try:
            with without_modes():
                out = func(*given[0], **given[1])
            return tree_map(self.parts.weight_itself, out)
        except WritesAbsent as error:  # what a block keeps, in a copy that nobody uses
            if not self.inside or storage_id_of(error.tensor) not in self.thrown_away:
                raise
            return kwargs.get("out", args[0] if args else None)

    def numbered(self, out: Any, given: Collection[int] = (), drawn: bool = False) -> Any:
        """What was made between blocks or by one, with numbers. What a block was `given` and gives on is nothing new."""
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

    def brought(self, given: Any) -> Any:
        """The same with the values that were received in place of those that are absent."""
        leaves, structure = tree_flatten(given)
        return tree_unflatten([self.real(leaf) if isinstance(leaf, Absent) else leaf for leaf in leaves], structure)

    def real(self, leaf: Absent) -> Tensor:
        if (number := self.number_of(leaf)) is None or number not in self.values:
            raise Mistake(
                f"the model uses something after {self.parts.name_of(self.call)} that an earlier block made, and when one "
                f"forward was looked at it did not: what its forward does must not depend on the step"
            )
        return self.values[number]

    def used(self, leaves: Iterable[Tensor]) -> None:
        """Values are used now; who only looks at a model keeps that."""

    # Blocks

    @contextmanager
    def through(self) -> Iterator[Walk]:
        """While inside, the model's forward goes this way."""
        forwards = {
            block: instead(block, self.entering(number, block.forward))
            for number, block in enumerate(self.parts.blocks.values())
        }
        with patched(forwards), self:
            yield self

    def entering(self, number: int, inner: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.inside:
                return inner(*args, **kwargs)
            self.enter(number, (args, kwargs))
            if not self.here:
                given = {id(leaf) for leaf in tree_leaves((args, kwargs))}
                return self.numbered(self.elsewhere(number, inner, args, kwargs), given)
            here = self.brought((args, kwargs))
            out = self.computed(inner, *here)
            return self.numbered(out, {id(leaf) for leaf in tree_leaves(here)})

        return forward

    def computed(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a block of this worker gives. One that met nothing absent when it was called the first time is not watched again, which
        takes time; should it meet something after all, that is told."""
        self.inside, self.met = True, False
        key = self.call, torch.is_grad_enabled()  # a validation may go another way
        quiet = key in self.parts.quiet
        try:
            with unwatched_by(self) if quiet else nullcontext():
                out = inner(*args, **kwargs)
        finally:
            self.inside = False
        if quiet and any(isinstance(leaf, Absent) for leaf in tree_leaves(out)):
            raise Mistake(
                f"{self.parts.name_of(self.call)} uses something that was made before it and that it was not given, and did "
                f"not do so the first time: what a model that is cut into stages does must not depend on the step"
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
        self.used([leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)])

    def take(self) -> None:
        """What crosses the cut arrives."""
        ours: dict[Number, Tensor] = {**self.absents, **self.locals}
        missing = [value for value in self.takes if value.number not in ours]
        if missing:
            raise Mistake(
                f"something that {self.parts.name_of(missing[0].number[0])} made when one forward was looked at was not made "
                f"now: what a model that is cut into stages does must not depend on the step"
            )
        for value, arrived in zip(self.takes, self.bring([ours[value.number] for value in self.takes]), strict=True):
            if value.number in self.locals:  # whoever holds what was drawn here sees what the others use
                with torch.no_grad():
                    self.locals[value.number].copy_(arrived)
                continue
            self.values[value.number] = arrived
            self.numbers[id(arrived)] = value.number, weakref.ref(arrived)

    def result(self) -> list[Tensor]:
        """What crosses the next cut."""
        missing = [value for value in self.gives if value.number not in self.values]
        if missing:
            raise Mistake(
                f"{self.parts.name_of(missing[0].number[0])} did not give what it gave when one forward was looked at: what a "
                f"model that is cut into stages does must not depend on the step"
            )
        return [self.values[value.number] for value in self.gives]

    def forget(self) -> None:
        """It is over: nothing that it has seen lives longer because of it."""
        for known in (self.values, self.absents, self.locals, self.numbers):
            known.clear()
        self.bring = nothing

    def elsewhere(self, number: int, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a block that is not computed here would give: nothing of it is here, whatever it depends on. The same shapes again are
        looked up."""
        leaves, _ = tree_flatten((args, kwargs))
        key = (number, tuple(map(kind_of, leaves)))
        known = self.parts.recipes.get(key)
        if known is not None:
            return known.again(leaves)
        out = self.imagined(number, inner, args, kwargs)
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

    def imagined(self, number: int, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a block's own code gives without computing. What it keeps stays as it is: it was not called here."""
        block = list(self.parts.blocks.values())[number]
        self.inside = True
        try:
            with scratch(block, self.parts.model) as self.thrown_away:
                return inner(*args, **kwargs)
        finally:
            self.inside, self.thrown_away = False, set()


def nothing(absents: Sequence[Tensor]) -> Sequence[Tensor]:
    """What arrives where nothing is awaited."""
    return ()


@dataclass
class ModelParts:
    """A model's blocks and weights, as walks need them; and what walks have found."""

    model: nn.Module
    blocks: Mapping[str, nn.Module]
    hollow: dict[int, Absent]  # by id of a weight, what stands for it where it is not
    weights: dict[int, nn.Parameter]  # the other way round
    chain: Chain | None = None
    recipes: dict[Any, BlockOutput] = field(default_factory=dict)
    quiet: set[tuple[int, bool]] = field(
        default_factory=set
    )  # calls, with gradients or without, that met nothing absent

    def weight_itself(self, leaf: Any) -> Any:
        """A weight for what stands for it, where a function gives back what it is given."""
        return self.weights.get(id(leaf), leaf) if isinstance(leaf, Absent) else leaf

    def name_of(self, call: int) -> str:
        return "what comes before its blocks" if call < 0 or self.chain is None else self.chain.calls[call]


def parts_of(model: nn.Module, blocks: Mapping[str, nn.Module], gradients: bool = False) -> ModelParts:
    with without_modes():  # who counts memory does not count what has none
        hollow = {id(one): absent(one, gradient=gradients and one.requires_grad) for one in model.parameters()}
        return ModelParts(model, blocks, hollow, {id(hollow[id(one)]): one for one in model.parameters()})


@dataclass(frozen=True)
class BlockOutput:
    """What a block gave: its structure, and of each leaf a new absent tensor like this one, an argument by its number, or a plain value."""

    structure: Any
    leaves: tuple[Any, ...]

    def again(self, given: Sequence[Any]) -> Any:
        made = [
            given[leaf.number]
            if isinstance(leaf, Argument)
            else absent(leaf.shaped, leaf.device)
            if isinstance(leaf, Absent)
            else leaf
            for leaf in self.leaves
        ]
        return tree_unflatten(made, self.structure)


@dataclass(frozen=True)
class Argument:
    number: int


PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device)


def recipe_of(out: Any, given: Sequence[Any]) -> BlockOutput | None:
    """How to make the same again; None where that can't be said."""
    places = {id(leaf): number for number, leaf in enumerate(given) if isinstance(leaf, Tensor)}
    leaves, structure = tree_flatten(out)
    kept: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor) and id(leaf) in places:
            kept.append(Argument(places[id(leaf)]))
        elif isinstance(leaf, (Absent, *PLAIN)):
            kept.append(leaf)
        else:
            return None
    return BlockOutput(structure, tuple(kept))


def kind_of(leaf: Any) -> Any:
    """What a block's results depend on, of one argument."""
    if isinstance(leaf, Tensor):
        return type(leaf) is Absent, leaf.dtype, leaf.shape, leaf.stride()
    return leaf if isinstance(leaf, PLAIN) else type(leaf)


def has_absent(args: Any, kwargs: Any) -> bool:
    for leaf in (*args, *kwargs.values()) if kwargs else args:
        if type(leaf) is Absent or (type(leaf) in (tuple, list) and has_absent(leaf, {})):
            return True
    return False
