"""A model as a chain of blocks: one forward and loss are looked at, on shapes alone, and what crosses every cut is known."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.core import random_state
from shoestring.core.absent import Absent
from shoestring.core.batch import Batch, moved
from shoestring.core.errors import Mistake
from shoestring.core.private import tree_leaves, without_modes
from shoestring.core.run import Run
from shoestring.parallel.walk import ABOUT_TENSORS, Chain, Number, Parts, Value, Walk, parts_of


class Looking(Walk):
    """A walk that computes nothing and keeps who used what."""

    def __init__(self, parts: Parts, model: nn.Module) -> None:
        super().__init__(parts, range(0), lambda absents: ())
        self.names = {id(one): name for name, one in (*model.named_parameters(), *model.named_buffers())}
        self.buffers = {id(one) for one in model.buffers()}
        self.called: list[int] = []
        self.last_use: dict[Number, int] = {}          # of a value: the last call with which, or after which, it was used
        self.born: dict[Number, Value] = {}
        self.weights_used: dict[int, set[str]] = {}    # by call
        self.buffers_used: dict[int, set[str]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs or {})) if func not in ABOUT_TENSORS else ():   # those that depend on no weight, too
            if id(leaf) in self.buffers:
                self.buffers_used.setdefault(max(self.call, 0), set()).add(self.names[id(leaf)])
        return super().__torch_function__(func, types, args, kwargs)

    def used(self, leaves: Iterable[Tensor]) -> None:
        for leaf in leaves:
            if (number := self.number_of(leaf)) is not None:
                self.last_use[number] = max(self.call, self.last_use.get(number, -1))
            elif isinstance(leaf, Absent) and not self.inside:
                raise Mistake(f"after {self.parts.name_of(self.call)} the model uses a tensor that a block gave in an object which nobody "
                              f"can look into, or left somewhere: let blocks return tensors, in tuples, lists and dicts")
            elif id(leaf) in self.parts.hollow:
                self.weights_used.setdefault(max(self.call, 0), set()).add(self.names[id(leaf)])

    def note(self, leaf: Tensor, number: Number) -> None:
        super().note(leaf, number)
        self.born[number] = Value(number, leaf.nbytes, leaf.requires_grad)

    def enter(self, block: int, given: Any) -> None:
        super().enter(block, given)
        self.called.append(block)


def chain_of(run: Run, batch: Batch | None = None) -> Chain:
    """The chain of a run's model, found with a batch like those to come. Refused where the model can't be cut, with where and why."""
    with without_modes(), random_state.kept():   # nothing of this is a part of training
        if batch is None:
            if run.example is None:
                raise Mistake("nobody gave a batch to look at the model with")
            batch = run.example()
        device = next(run.model.parameters()).device
        first = run.slices(run, moved(batch, device))[0]
        with first.within():
            return looked(run, first.batch)


def looked(run: Run, batch: Batch) -> Chain:
    walk = Looking(parts_of(run.model, run.blocks, gradients=True), run.model)
    try:
        with torch.enable_grad(), walk.through():
            run.loss(run.forward(run.model, batch), batch)
    except Mistake as error:
        raise Mistake(f"the model can't be cut into stages: {error}") from error
    except Exception as error:
        where = list(run.blocks)[walk.called[-1]] if walk.called else "what comes before its blocks"
        raise Mistake(f"the model can't be cut into stages: when its forward was looked at without computing it, it failed in or after "
                      f"{where} ({type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''})") from error
    return found(walk, run.blocks)


def found(walk: Looking, blocks: Mapping[str, nn.Module]) -> Chain:
    names = list(blocks)
    if len(walk.called) < 2:
        raise Mistake(f"the model can't be cut into stages: its forward calls {len(walk.called)} of its blocks "
                      f"({', '.join(names) or 'none'}), and a cut lies between two")
    crossing = [tuple(walk.born[number] for number, use in sorted(walk.last_use.items()) if number[0] < call <= use)
                for call in range(len(walk.called))]
    called = [blocks[names[block]] for block in walk.called]
    own = [{walk.names[id(one)] for one in block.parameters()} for block in called]   # of a weight with several names, the first
    kept = [{walk.names[id(one)] for one in block.buffers()} for block in called]
    return Chain(
        tuple(names[block] for block in walk.called), ((), *crossing[1:]),
        tuple(frozenset(own[call] | walk.weights_used.get(call, set())) for call in range(len(own))),
        tuple(frozenset(kept[call] | walk.buffers_used.get(call, set())) for call in range(len(own))),
    )
