"""The engine of a pipeline: one worker's chunks of a model, and its part in the order of a batch's pieces.

    forward of a piece     receive what crosses the cut, run the user's forward through the chunk (parallel/walk.py), send what crosses the next
    backward of a piece    receive the gradients of what was sent, run backward, send those of what was received

What is sent is held until a moment of the step that does not depend on how fast others are: values until their own backward, gradients
until the next are sent. A weight that several workers use (tied embeddings) is held by each, and their gradients are added up.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.core.batch import Batch, moved
from shoestring.core.errors import Mistake
from shoestring.core.link import Done, Link, Sending
from shoestring.core.private import backward_to_inputs, backward_to_weights, storage_id_of, tree_flatten, tree_unflatten
from shoestring.core.run import Run, weighed
from shoestring.measure.interception import Guard
from shoestring.parallel.absent import Absent
from shoestring.parallel.chain import chain_of
from shoestring.parallel.schedule import Action, Kind, Orders, Span
from shoestring.parallel.staged_state import StagedState, released
from shoestring.parallel.walk import Left, Value, Walk, parts_of

VALUES = 256   # that may cross one cut: tags of messages count them


class Crossing:
    """What crosses a cut, as the result of a forward that was left; an object that techniques around it pass on as it is."""

    def __init__(self, values: list[Tensor]) -> None:
        self.values = values


class Boundary(torch.autograd.Function):
    """A number whose backward brings gradients from elsewhere to the values that were sent: so every backward begins at a number."""

    @staticmethod
    def forward(ctx: Any, bring: Callable[[], Sequence[Tensor]], *values: Tensor) -> Tensor:
        ctx.bring = bring
        return values[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, *ctx.bring()


@dataclass
class Flight:
    """A piece between its forward and its backward in one chunk."""

    inputs: list[Tensor]                     # received, of those that want a gradient
    root: Tensor | None                      # where its backward begins; None: nothing wants a gradient
    sendings: list[Sending] = field(default_factory=list)
    groups: Any = None                       # what is left to do for weights, when that of inputs is done


class Stages(StagedState):
    """One worker's part of a pipeline."""

    def __init__(self, run: Run, link: Link, bounds: Callable[[Any], Sequence[range]], orders: Callable[[int], Orders], pieces: int) -> None:
        self.run, self.link, self.pieces = run, link, pieces
        self.orders = orders                           # of a number of pieces
        chain = chain_of(run)
        self.parts = parts_of(run.model, run.blocks)
        self.parts.chain = chain
        self.ranges = bounds(chain)                    # of calls, by chunk
        self.chunks = range(link.rank, len(self.ranges), link.world)
        homes = [number % link.world for number, calls in enumerate(self.ranges) for _ in calls]
        super().__init__(run, link, self.users(chain.weights, homes), self.users(chain.buffers, homes))
        self.blocks = {name: run.blocks[name] for number in self.chunks for call in self.ranges[number]
                       for name in [chain.calls[call]]}
        self.walk: Walk | None = None
        self.gathered = False                          # all weights are here
        self.flights: dict[tuple[int, int], Flight] = {}
        self.gradients_sent: list[Sending] = []
        self.spans: list[Span] = []                    # of the last step
        self.begun = 0.0

    def users(self, names: Sequence[frozenset[str]], homes: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """By name, the workers that use it."""
        found: dict[str, set[int]] = {}
        for used, home in zip(names, homes, strict=True):
            for name in used:
                found.setdefault(name, set()).add(home)
        return {name: tuple(sorted(workers)) for name, workers in found.items()}

    # The step

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """The user's forward, through the chunk that is in turn."""
        assert self.walk is not None, "who calls has said which chunk it is"
        with self.walk.through():
            try:
                return self.run.forward(model, batch)
            except Left:
                return Crossing(self.walk.result())

    def gradients(self, now: Run, batch: Batch) -> Tensor:
        device = next(iter(self.own_weights)).device
        here = now.pieces(moved(batch, device), min(self.pieces, now.count(batch)))
        whole = float(now.weight(batch))
        shares = [float(now.weight(piece)) / whole if whole else 0.0 for piece in here]
        order = self.orders(len(here))[self.link.rank]
        final = max((number for number, one in enumerate(order) if one.kind in (Kind.BACKWARD, Kind.WEIGHTS)), default=-1)
        total = torch.zeros((), device=device)
        self.spans = []
        for number, action in enumerate(order):
            part = replace(now, last=now.last and number == final)
            self.begun = time.perf_counter()
            if action.kind is Kind.FORWARD:
                loss = self.forward_piece(part, here[action.piece], shares[action.piece], action)
                total = total if loss is None else total + loss
            else:
                self.backward_piece(part, action)
        self.done(self.gradients_sent)
        if now.last:
            self.add_up_tied()
        total = total.float().reshape(1)
        self.link.sum(total).wait()
        return total[0].clone()

    def forward_piece(self, now: Run, piece: Batch, share: float, action: Action) -> Tensor | None:
        """One piece through one chunk; gives its loss if that ends there."""
        inputs: list[Tensor] = []

        def bring(absents: Sequence[Absent]) -> list[Tensor]:
            found = self.received(absents, walk.takes, action)
            inputs.extend(one for one in found if one.requires_grad)
            return found

        walk = self.walk = Walk(self.parts, self.ranges[action.chunk], bring)
        output = now.forward(now.model, piece)
        self.walk = None
        if isinstance(output, Crossing):
            root, sendings = self.handed_on(output.values, walk.gives, action)
            loss = None
        else:
            with walk:
                value = weighed(now.loss(output, piece), share)
            if value.numel() != 1:
                raise Mistake(f"the job's loss gave a tensor of shape {tuple(value.shape)}: it must be one number, the mean over the batch")
            root, sendings, loss = value, [], value.detach()
        self.flights[action.piece, action.chunk] = Flight(inputs, root, sendings)
        return loss

    def received(self, absents: Sequence[Absent], values: Sequence[Value], action: Action) -> list[Tensor]:
        found = []
        for number, (like, value) in enumerate(zip(absents, values, strict=True)):
            arrived = torch.empty(like.shape, dtype=like.dtype, device=like.device)
            self.link.receive(arrived, self.home(action.chunk - 1), self.tag(Kind.FORWARD, action.piece, action.chunk, number))
            found.append(arrived.requires_grad_(value.gradient and torch.is_grad_enabled()))
        self.begun = time.perf_counter()
        return found

    def handed_on(self, made: list[Tensor], values: Sequence[Value], action: Action) -> tuple[Tensor | None, list[Sending]]:
        """Send what crosses the next cut; gives where backward will begin."""
        wanted = [(number, one) for number, (one, value) in enumerate(zip(made, values, strict=True)) if value.gradient]
        shapes = [(number, one.shape, one.dtype) for number, one in wanted]
        device = made[0].device if made else None

        def bring() -> list[Tensor]:
            found = [torch.empty(shape, dtype=dtype, device=device) for _, shape, dtype in shapes]
            for (number, _, _), arrived in zip(shapes, found, strict=True):
                self.link.receive(arrived, self.home(action.chunk + 1), self.tag(Kind.BACKWARD, action.piece, action.chunk, number))
            self.begun = time.perf_counter()
            return found

        asking = [one for _, one in wanted]
        for one in asking:
            if not one.requires_grad:
                raise Mistake(f"what {self.parts.name_of(self.ranges[action.chunk].stop - 1)} gives asked for a gradient when one forward "
                              f"was looked at, and does not now: what is frozen must not change while a model is cut into stages")
        root = Boundary.apply(bring, *asking) if asking else None
        self.spans.append(Span(action, self.begun, time.perf_counter()))
        sendings = [self.link.sending(one.detach().contiguous(), self.home(action.chunk + 1),
                                      self.tag(Kind.FORWARD, action.piece, action.chunk + 1, number)) for number, one in enumerate(made)]
        return root, sendings

    def backward_piece(self, now: Run, action: Action) -> None:
        key = action.piece, action.chunk
        flight = self.flights[key] if action.kind is Kind.INPUTS else self.flights.pop(key)
        self.done(flight.sendings)
        if flight.root is None:
            return
        if action.kind is Kind.BACKWARD or not flight.inputs:   # without inputs, nobody waits for them
            if action.kind is not Kind.INPUTS:
                now.backward(now, flight.root)
        elif action.kind is Kind.INPUTS:
            flight.groups = backward_to_inputs(flight.root, flight.inputs, self.own_weights)
        else:
            self.backward_weights(now, flight)
        if action.chunk == len(self.ranges) - 1 or action.kind is not Kind.FORWARD:
            self.spans.append(Span(action, self.begun, time.perf_counter()))
        if action.kind is not Kind.WEIGHTS:
            self.send_gradients(flight.inputs, action)

    def backward_weights(self, now: Run, flight: Flight) -> None:
        """The gradients of weights that were left out, given to them by a backward of their own, so that whoever waits for them sees them."""
        before = [one.grad for one in self.own_weights]
        for one in self.own_weights:
            one.grad = None
        backward_to_weights(self.own_weights, flight.groups)
        found = [one.grad for one in self.own_weights]
        for one, earlier in zip(self.own_weights, before, strict=True):
            one.grad = earlier
        reached = [(one, gradient) for one, gradient in zip(self.own_weights, found, strict=True) if gradient is not None]
        if reached:
            now.backward(now, Boundary.apply(lambda: [gradient for _, gradient in reached], *(one for one, _ in reached)))

    def send_gradients(self, inputs: list[Tensor], action: Action) -> None:
        self.done(self.gradients_sent)
        if action.chunk == 0:
            return
        values = [number for number, value in enumerate(self.walk_takes(action.chunk)) if value.gradient]
        for number, one in zip(values, inputs, strict=True):
            gradient = one.grad if one.grad is not None else torch.zeros_like(one)
            one.grad = None
            self.gradients_sent.append(Held(gradient, self.link.sending(
                gradient.contiguous(), self.home(action.chunk - 1), self.tag(Kind.BACKWARD, action.piece, action.chunk - 1, number))))

    def walk_takes(self, chunk: int) -> Sequence[Value]:
        chain = self.parts.chain
        assert chain is not None, "it was looked at when the engine was made"
        return chain.crossing[self.ranges[chunk].start]

    def home(self, chunk: int) -> int:
        return chunk % self.link.world

    def tag(self, kind: Kind, piece: int, chunk: int, value: int) -> int:
        return ((piece * len(self.ranges) + chunk) * 2 + (kind is Kind.BACKWARD)) * VALUES + value

    def done(self, sendings: list[Sending]) -> None:
        for sending in sendings:
            sending.wait()
        sendings.clear()

    def add_up_tied(self) -> None:
        """Of every weight that several workers use, the sum of their gradients: the first of them adds up, in the order of workers."""
        for name, users in sorted(self.tied.items()):
            if self.link.rank not in users:
                continue
            one = self.by_name[name]
            gradient = one.grad if one.grad is not None else torch.zeros_like(one)
            first, *others = users
            if self.link.rank == first:
                arrived = torch.empty_like(gradient)
                for other in others:
                    self.link.receive(arrived, other)
                    gradient += arrived
                for other in others:
                    self.link.send(gradient, other)
            else:
                self.link.send(gradient, first)
                self.link.receive(gradient, first)
            one.grad = gradient

    # Outside of a step

    @contextmanager
    def together(self) -> Iterator[None]:
        """While inside, all workers may call the model at the same time: each computes its part."""
        yield

    @contextmanager
    def usable(self) -> Iterator[None]:
        """While inside, all weights are here."""
        self.gather()
        self.gathered = True
        try:
            yield
        finally:
            self.gathered = False
            self.release()

    def guarding(self) -> AbstractContextManager[object]:
        empty = {storage_id_of(one): name for name, one in self.by_name.items() if not self.uses(name)} if not self.gathered else {}

        def absent(leaf: Tensor) -> str:
            return "" if leaf.untyped_storage().nbytes() or not leaf.numel() else empty.get(storage_id_of(leaf), "a buffer")

        return Guard(absent, "with Pipeline a worker has the weights of its own stages; use a plan without it")

    def evaluate(self, model: nn.Module, batch: Batch) -> Any:
        """The model's output, on every worker: each computes its part, and the last gives the others what comes out."""
        if self.gathered:
            return self.run.evaluate(model, batch)
        output: Any = None
        last = len(self.ranges) - 1
        for chunk in self.chunks:
            action = Action(Kind.FORWARD, 0, chunk)
            walk = Walk(self.parts, self.ranges[chunk], lambda absents, action=action: self.received(  # type: ignore[misc]
                absents, self.walk_takes(action.chunk), action))
            with walk.through():
                try:
                    output = self.run.evaluate(model, batch)
                except Left:
                    _, sendings = self.handed_on(walk.result(), [replace(one, gradient=False) for one in walk.gives], action)
                    self.done(sendings)
        if last not in self.chunks:
            walk = Walk(self.parts, range(0), lambda absents: ())
            with walk.through():
                output = self.run.evaluate(model, batch)
        return self.shared(output, walk)

    def shared(self, output: Any, walk: Walk) -> Any:
        """What the last worker has of an output, for all."""
        last = len(self.ranges) - 1
        start, carried = self.ranges[last].start, {value.number for value in self.walk_takes(last)}
        leaves, structure = tree_flatten(output)
        for place, leaf in enumerate(leaves):
            number = walk.number_of(leaf) if isinstance(leaf, Tensor) else None
            if number is None or not (number[0] >= start or number in carried):
                continue
            if last in self.chunks:
                leaves[place] = walk.real(leaf) if isinstance(leaf, Absent) else leaf
                for other in range(self.link.world):
                    if other != self.link.rank:
                        self.link.send(leaves[place].detach().contiguous(), other)
            else:
                leaves[place] = torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
                self.link.receive(leaves[place], self.home(last))
        return tree_unflatten(leaves, structure)


class Held:
    """A tensor that is on its way, and there until somebody waits."""

    def __init__(self, tensor: Tensor, sending: Sending) -> None:
        self.tensor: Tensor | None = tensor
        self.sending = sending

    def wait(self) -> None:
        self.sending.wait()
        self.tensor, self.sending = None, Done()
