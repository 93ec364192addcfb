"""Records the operations of a stacked gradient once and replays them, without the overhead of autograd and
torch.func.vmap.

Autograd and vmap dispatch anew in every step, which for small models takes longer than the computation. So for a shape
that occurs often, make_fx traces the operations once, idle ones are dropped, and TorchScript replays the rest without
Python: the same kernels on the same numbers. The trace runs on copies of the tensors, and the model's state is restored
before the real step is taken.

A recording is used only if it gives the same bits as the live computation, so results don't depend on when it was made.
Not recorded are models with data-dependent control flow, models that keep state, and models that draw from Python's or
NumPy's generators. Other hidden inputs (a clock, a counter elsewhere) are found by comparing a recording with the live
computation after 1, 2, 4, 8, ... uses.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from shoestring.core.batch import Batch, leaves, map_leaves
from shoestring.core.private import operation_writes, without_vmap_warnings
from shoestring.core.running import random_state
from shoestring.federated.devices.records import generator_states
from shoestring.federated.simulation.cohort.method import MethodDiffers
from shoestring.training.memory.recompute.block_state import BlockState, put_back

Weights = dict[str, Tensor]  # (k, ...) each, by name
Losses = Callable[
    [Weights, Batch, Tensor | None], Tensor
]  # weights, batch, weights of samples (k, batch) or None -> every device's loss (k)
LossesAndGradients = tuple[
    Tensor, list[Tensor | None]
]  # losses, and the gradient of every weight; None: the weight is unused

AFTER = 32  # occurrences of a shape before it is recorded; a recording pays for itself after about a hundred steps
MOST = 16  # recordings at most
SETTLED = 3  # calls after which TorchScript's profiling executor has settled


class Gradients:
    def __init__(self, losses: Losses, model: nn.Module) -> None:
        self.losses, self.model, self.refused = losses, model, False
        self.times: Counter[Any] = Counter()
        self.recordings: dict[Any, RecordedGradients] = {}

    def __call__(self, weights: Weights, batch: Batch, shares: Tensor | None) -> LossesAndGradients:
        """Losses and gradients of all devices. The gradient of the sum of their losses is every device's own gradient."""
        tensors = [*weights.values(), *leaves(batch), *([] if shares is None else [shares])]
        shape = tuple((one.shape, one.stride(), one.dtype) for one in tensors)
        call = self.tensor_function(list(weights), batch, shares is not None)
        self.times[shape] += 1
        if shape in self.recordings:
            return self.replay(self.recordings[shape], call, tensors)
        if self.refused or self.times[shape] != AFTER or len(self.recordings) == MOST:
            return call(*tensors)
        return self.record(call, tensors, shape)

    def without_recording(self, weights: Weights, batch: Batch, shares: Tensor | None) -> LossesAndGradients:
        """Losses and gradients, computed without a recording."""
        return self.tensor_function(list(weights), batch, shares is not None)(
            *weights.values(), *leaves(batch), *([] if shares is None else [shares])
        )

    def tensor_function(self, names: list[str], batch: Batch, shared: bool) -> Callable[..., LossesAndGradients]:
        """The computation as a function of a flat list of tensors."""

        def call(*tensors: Tensor) -> LossesAndGradients:
            weights = [one.detach().requires_grad_() for one in tensors[: len(names)]]
            rest = iter(tensors[len(names) :])
            with torch.enable_grad(), without_vmap_warnings():
                inside = map_leaves(lambda leaf: next(rest), batch)
                losses = self.losses(dict(zip(names, weights, strict=True)), inside, next(rest) if shared else None)
                return losses.detach(), list(torch.autograd.grad(losses.sum(), weights, allow_unused=True))

        return call

    def record(self, call: Callable[..., LossesAndGradients], tensors: list[Tensor], shape: Any) -> LossesAndGradients:
        """Compute losses and gradients, and keep a recording of the computation if it gives the same bits."""
        made, again = None, None
        try:
            with restoring_state(self.model):
                there = [one is not None for one in call(*clone_all(tensors))[1]]
            with restoring_state(self.model):
                made = RecordedGradients(call, clone_all(tensors), there)
            for _ in range(SETTLED):  # TorchScript profiles some calls before it optimizes
                with random_state.fork_rng():
                    again = made(*clone_all(tensors))
        except Exception:  # anything in a model that can't be recorded
            made = None
        before, drawn = BlockState(self.model).picture(), unrecorded_generators()
        right = call(*tensors)
        if (
            made is None
            or again is None
            or not same_bits(again, right)
            or drawn != unrecorded_generators()
            or not all(one.same() for one in before)
        ):
            self.refused = True
        else:
            self.recordings[shape] = made
        return right

    def replay(
        self, recording: RecordedGradients, call: Callable[..., LossesAndGradients], tensors: list[Tensor]
    ) -> LossesAndGradients:
        """Replay a recording; after 1, 2, 4, 8, ... uses compare it with the live computation."""
        recording.uses += 1
        if recording.uses & (recording.uses - 1):
            return recording(*tensors)
        with random_state.fork_rng():
            found = recording(*clone_all(tensors))
        right = call(*tensors)
        if not same_bits(found, right):
            raise MethodDiffers(
                f"the model computes something else than its recording {recording.uses} steps later: it depends on something that "
                f"is neither in its weights nor in its batch"
            )
        return right


def clone_all(tensors: list[Tensor]) -> list[Tensor]:
    return [one.clone() for one in tensors]


@contextmanager
def restoring_state(model: nn.Module) -> Iterator[None]:
    """Restore the model's state and the random generators on exit."""
    picture = BlockState(model).picture()
    try:
        with random_state.fork_rng():
            yield
    finally:
        put_back(picture)


def unrecorded_generators() -> tuple[object, ...]:
    """The state of the generators that a recording does not replay: Python's and NumPy's."""
    return generator_states()[:-1]


class RecordedGradients:
    """A recorded computation for tensors of one shape; `there`: which weights have a gradient."""

    def __init__(self, call: Callable[..., LossesAndGradients], tensors: list[Tensor], there: list[bool]) -> None:
        from torch.fx.experimental.proxy_tensor import make_fx

        def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
            losses, gradients = call(*tensors)
            return losses, *(one for one in gradients if one is not None)

        self.there, self.uses, self.play = there, 0, to_torchscript(drop_idle_calls(make_fx(flat)(*tensors)))

    @torch.no_grad()
    def __call__(self, *tensors: Tensor) -> LossesAndGradients:
        losses, *found = self.play(*tensors)
        gradients = iter(found)
        return losses, [next(gradients) if one else None for one in self.there]


def drop_idle_calls(made: fx.GraphModule) -> fx.GraphModule:
    """Remove operations that return their argument unchanged."""
    aten, graph = torch.ops.aten, made.graph
    calls = [node for node in graph.nodes if operation_writes(node.target) is not None]
    in_place = any(operation_writes(node.target) for node in calls)
    for node in calls:
        idle = (
            node.target is aten.detach.default
            or (node.target is aten.permute.default and list(node.args[1]) == list(range(len(node.args[1]))))
            or (node.target is aten.mul.Scalar and node.args[1:] == (1,) and not in_place)
        )
        if idle and not any(user.op == "output" for user in node.users):  # an output must not share its memory
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()
    made.recompile()
    return made


def to_torchscript(made: fx.GraphModule) -> Callable[..., Any]:
    """Compile to TorchScript, which wants operations without overload names and devices as strings."""
    made.graph.set_codegen(fx.graph.CodeGen())
    for node in made.graph.nodes:
        node.kwargs = {
            name: str(value) if isinstance(value, torch.device) else value for name, value in node.kwargs.items()
        }
        if operation_writes(node.target) is not None:
            node.target = node.target.overloadpacket
    made.recompile()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about annotations of its own making
        program: Callable[..., Any] = torch.jit.script(made)
    return program


def same_bits(found: LossesAndGradients, right: LossesAndGradients) -> bool:
    pairs = zip((found[0], *found[1]), (right[0], *right[1]), strict=True)
    return all(one is other if one is None or other is None else same_numbers(one, other) for one, other in pairs)


def same_numbers(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have equal numbers (nan equals nan) and strides."""
    return one.stride() == other.stride() and bool(((one == other) | (one.isnan() & other.isnan())).all())


def match_strides(weight: Tensor, gradient: Tensor) -> Tensor:
    """The gradient with its weight's strides, as fused optimizers require."""
    return gradient if gradient.stride() == weight.stride() else torch.empty_like(weight).copy_(gradient)
