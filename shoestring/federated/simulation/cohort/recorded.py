"""Gradients of stacked devices from a recording: what autograd and torch.func.vmap would call, without them.

They decide anew in every step what is to be called, which for small models takes longer than the calls. So of a shape that comes often the
calls are recorded once (make_fx), those that change nothing are left out, and the rest is played from then on by TorchScript, which calls
operations without Python: the same kernels on the same numbers. It is made of copies of the tensors, and the model is put back as it was
before the step is really taken, once. A recording is only used if it gave the same bits as what it stands for, so nobody can tell when it
was made. Models that look at values can't be recorded; what a model keeps or what it draws from Python's or NumPy's generators would be
recorded as it was, so those are not. What nobody can notice beforehand (a clock, a counter elsewhere) is found by playing a recording
beside what it stands for, after 1, 2, 4, 8, ... steps.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from shoestring.core import random_state
from shoestring.core.batch import Batch, leaves, mapped
from shoestring.core.private import operation_writes, without_vmap_warnings
from shoestring.federated.records import drawn_so_far
from shoestring.federated.simulation.cohort.way import Differs
from shoestring.training.memory.block_state import BlockState, put_back

Weights = dict[str, Tensor]  # (k, ...) each, by name
Losses = Callable[
    [Weights, Batch, Tensor | None], Tensor
]  # (k): of every device; the last argument: (k, batch), shares of samples
Found = tuple[Tensor, list[Tensor | None]]  # losses, and the gradient of every weight; None: it has no part in them

AFTER = 32  # times that a shape has come before it is recorded: recording takes as long as about a hundred steps gain
MOST = 16  # recordings
SETTLED = 3  # calls of one before it is what it will be


class Gradients:
    def __init__(self, losses: Losses, model: nn.Module) -> None:
        self.losses, self.model, self.refused = losses, model, False
        self.times: Counter[Any] = Counter()
        self.recordings: dict[Any, RecordedGradients] = {}

    def __call__(self, weights: Weights, batch: Batch, shares: Tensor | None) -> Found:
        """Of the sum of all devices' losses, which is every device's own."""
        tensors = [*weights.values(), *leaves(batch), *([] if shares is None else [shares])]
        shape = tuple((one.shape, one.stride(), one.dtype) for one in tensors)
        call = self.called_with(list(weights), batch, shares is not None)
        self.times[shape] += 1
        if shape in self.recordings:
            return self.played(self.recordings[shape], call, tensors)
        if self.refused or self.times[shape] != AFTER or len(self.recordings) == MOST:
            return call(*tensors)
        return self.recorded(call, tensors, shape)

    def live(self, weights: Weights, batch: Batch, shares: Tensor | None) -> Found:
        """The same without a recording."""
        return self.called_with(list(weights), batch, shares is not None)(
            *weights.values(), *leaves(batch), *([] if shares is None else [shares])
        )

    def called_with(self, names: list[str], batch: Batch, shared: bool) -> Callable[..., Found]:
        """The same as a function of tensors alone."""

        def call(*tensors: Tensor) -> Found:
            weights = [one.detach().requires_grad_() for one in tensors[: len(names)]]
            rest = iter(tensors[len(names) :])
            with torch.enable_grad(), without_vmap_warnings():
                inside = mapped(lambda leaf: next(rest), batch)
                losses = self.losses(dict(zip(names, weights, strict=True)), inside, next(rest) if shared else None)
                return losses.detach(), list(torch.autograd.grad(losses.sum(), weights, allow_unused=True))

        return call

    def recorded(self, call: Callable[..., Found], tensors: list[Tensor], shape: Any) -> Found:
        """What is asked for, and a recording of it if that gives the same bits."""
        made, again = None, None
        try:
            with without_trace(self.model):
                there = [one is not None for one in call(*copied(tensors))[1]]
            with without_trace(self.model):
                made = RecordedGradients(call, copied(tensors), there)
            for _ in range(SETTLED):  # TorchScript looks on for some calls before it makes up its mind
                with random_state.kept():
                    again = made(*copied(tensors))
        except Exception:  # whatever a model does that can't be recorded
            made = None
        before, drawn = BlockState(self.model).picture(), others_drawn()
        right = call(*tensors)
        if (
            made is None
            or again is None
            or not same_bits(again, right)
            or drawn != others_drawn()
            or not all(one.same() for one in before)
        ):
            self.refused = True
        else:
            self.recordings[shape] = made
        return right

    def played(self, recording: RecordedGradients, call: Callable[..., Found], tensors: list[Tensor]) -> Found:
        """What a recording gives; now and then beside what it stands for."""
        recording.uses += 1
        if recording.uses & (recording.uses - 1):
            return recording(*tensors)
        with random_state.kept():
            found = recording(*copied(tensors))
        right = call(*tensors)
        if not same_bits(found, right):
            raise Differs(
                f"what was recorded of the model is not what it computes {recording.uses} steps later: something steers it that "
                f"is neither in its weights nor in its batch"
            )
        return right


def copied(tensors: list[Tensor]) -> list[Tensor]:
    return [one.clone() for one in tensors]


@contextmanager
def without_trace(model: nn.Module) -> Iterator[None]:
    """Whatever a model keeps or draws inside, afterwards it and the generators are as they were."""
    picture = BlockState(model).picture()
    try:
        with random_state.kept():
            yield
    finally:
        put_back(picture)


def others_drawn() -> tuple[object, ...]:
    """Where the generators stand that a recording does not play: Python's and NumPy's."""
    return drawn_so_far()[:-1]


class RecordedGradients:
    """Of a call with tensors of one shape; `there`: which gradients it finds."""

    def __init__(self, call: Callable[..., Found], tensors: list[Tensor], there: list[bool]) -> None:
        from torch.fx.experimental.proxy_tensor import make_fx

        def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
            losses, gradients = call(*tensors)
            return losses, *(one for one in gradients if one is not None)

        self.there, self.uses, self.play = there, 0, scripted(shortened(make_fx(flat)(*tensors)))

    @torch.no_grad()
    def __call__(self, *tensors: Tensor) -> Found:
        losses, *found = self.play(*tensors)
        gradients = iter(found)
        return losses, [next(gradients) if one else None for one in self.there]


def shortened(made: fx.GraphModule) -> fx.GraphModule:
    """Without calls that give what they are given."""
    aten, graph = torch.ops.aten, made.graph
    calls = [node for node in graph.nodes if operation_writes(node.target) is not None]
    in_place = any(operation_writes(node.target) for node in calls)
    for node in calls:
        idle = (
            node.target is aten.detach.default
            or (node.target is aten.permute.default and list(node.args[1]) == list(range(len(node.args[1]))))
            or (node.target is aten.mul.Scalar and node.args[1:] == (1,) and not in_place)
        )
        if idle and not any(user.op == "output" for user in node.users):  # a gradient is nobody else's memory
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()
    made.recompile()
    return made


def scripted(made: fx.GraphModule) -> Callable[..., Any]:
    """As a program of TorchScript, whose operations have no overloads and whose devices are words."""
    made.graph.set_codegen(fx.graph.CodeGen())
    for node in made.graph.nodes:
        node.kwargs = {
            name: str(value) if isinstance(value, torch.device) else value for name, value in node.kwargs.items()
        }
        if operation_writes(node.target) is not None:
            node.target = node.target.overloadpacket
    made.recompile()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it speaks of annotations that are its own
        program: Callable[..., Any] = torch.jit.script(made)
    return program


def same_bits(found: Found, right: Found) -> bool:
    pairs = zip((found[0], *found[1]), (right[0], *right[1]), strict=True)
    return all(one is other if one is None or other is None else same_numbers(one, other) for one, other in pairs)


def same_numbers(one: Tensor, other: Tensor) -> bool:
    """Whether they are equal, where neither is a number too, and lie alike in memory."""
    return one.stride() == other.stride() and bool(((one == other) | (one.isnan() & other.isnan())).all())


def laid_out_like(weight: Tensor, gradient: Tensor) -> Tensor:
    """A gradient that lies in memory as its weight does, which fused optimizers take for granted."""
    return gradient if gradient.stride() == weight.stride() else torch.empty_like(weight).copy_(gradient)
