"""The pipeline engine: one worker's chunks of a model, and its part in the order of a batch's micro-batches.

    forward of a micro-batch     receive what crosses the cut, run the user's forward through the chunk (training/pipeline/stages/walk.py),
                                 send what crosses the next cut
    backward of a micro-batch    receive the gradients of what was sent, run backward, send the gradients of what was received

A sent tensor is held until the next message over the same cut (or as many as the order needs), so its lifetime does not
depend on how fast other workers are. A weight that several workers use (tied embeddings) is held by each of them, and
their gradients are summed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.core.batch import Batch, to_device
from shoestring.core.errors import Mistake
from shoestring.core.model.absent import Absent
from shoestring.core.private import storage_id_of, tree_flatten, tree_unflatten, unseen_functions
from shoestring.core.running.run import Run, add_up_shared, weighted_loss
from shoestring.core.running.run_state import DividesOptimizer, KeepsWeights, RecordsTimes, RunState, StoredTensor
from shoestring.core.workers.actions import Action, ActionSpan, Kind
from shoestring.core.workers.link import CompletedWork, Link, PeerLost, Sending
from shoestring.core.workers.staging import OwnTimes
from shoestring.measure.interception import Guard
from shoestring.training.pipeline.partition.chain import chain_of
from shoestring.training.pipeline.schedule import Orders, buffer_needed, in_slices
from shoestring.training.pipeline.stages.boundary import begin_with
from shoestring.training.pipeline.stages.shared_norms import SharedNorms
from shoestring.training.pipeline.stages.split_backward import DeferredWeights, goes_in_halves, to_inputs, to_weights
from shoestring.training.pipeline.stages.stage_state import StageWeights
from shoestring.training.pipeline.stages.step_clock import StepClock
from shoestring.training.pipeline.stages.walk import Chain, PartComputed, Value, Walk, nothing, parts_of

VALUES = 256  # most values that may cross one cut: message tags count them


class CutValues:
    """The values that cross a cut, as the result of an unfinished forward; opaque, so other techniques pass it on
    unchanged."""

    def __init__(self, values: list[Tensor]) -> None:
        self.values = values


@dataclass
class PieceInFlight:
    """A micro-batch between its forward and its backward in one chunk."""

    inputs: list[Tensor]  # received values that need a gradient
    root: Tensor | None  # where its backward begins; None: nothing needs a gradient
    rest: DeferredWeights | None = None  # the weight gradients, when those of inputs are done


class Stages(RunState, KeepsWeights, DividesOptimizer, RecordsTimes):
    """One worker's part of a pipeline."""

    def __init__(
        self,
        run: Run,
        link: Link,
        bounds: Callable[[Chain], Sequence[range]],
        orders: Callable[[int], Orders],
        pieces: int,
    ) -> None:
        self.run, self.link, self.pieces = run, link, pieces
        self.orders = orders  # a function of the number of micro-batches
        chain = self.chain = chain_of(run)
        self.parts = parts_of(run.model, run.blocks)
        self.parts.chain = chain
        self.ranges = bounds(chain)  # block calls of each chunk
        self.chunks = range(link.rank, len(self.ranges), link.world)
        homes = [number % link.world for number, calls in enumerate(self.ranges) for _ in calls]
        self.weights = StageWeights(run, link, users(chain.weights, homes), users(chain.buffers, homes))
        self.blocks = {
            name: run.blocks[name]
            for number in self.chunks
            for call in self.ranges[number]
            for name in [chain.calls[call]]
        }
        self.norms = SharedNorms(run.model, chain, self.ranges, link, self.home)
        self.walk: Walk | None = None
        self.gathered = False  # whether all weights are here
        self.flights: dict[tuple[int, int], PieceInFlight] = {}
        self.on_the_way: dict[
            tuple[Kind, int], deque[list[TensorInFlight]]
        ] = {}  # messages in flight, by kind and the chunk that they come from
        self.unread = 1  # messages that may be in flight over one cut
        self.spans: list[ActionSpan] = []  # of the last step
        self.begun = 0.0
        own = self.weights.one_of_them()
        self.like = own.new_empty(0)  # fake where weights are fake; the weight itself may belong to TensorParallel
        self.total: Tensor | None = None  # the sum of the losses that ended here, until it is taken
        self.clock = StepClock(link.same_machine)
        link.open_mailboxes()

    # One step

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """The user's forward, through the chunk whose turn it is."""
        assert self.walk is not None, "the caller has set the walk of a chunk"
        with self.walk.through():
            try:
                return self.run.forward(model, batch)
            except PartComputed:
                return CutValues(self.walk.result())

    def gradients(self, now: Run, batch: Batch) -> Tensor:
        for _ in self.passes(now, batch):
            pass
        self.wait_for_sends()
        self.norms.play()
        if now.last:
            add_up_shared(now.held.shared)
        total = self.taken_total().float().reshape(1)
        self.link.sum(total).wait()
        self.clock.note(self.spans)
        return total[0].clone()

    def passes(self, now: Run, batch: Batch) -> Iterator[Action]:
        """This worker's part of a batch: yields every action, and does it when the next is requested. `taken_total` is
        the loss then."""
        device = next(self.run.model.parameters()).device
        here = now.cuts.pieces(to_device(batch, device), min(self.pieces, now.cuts.count(batch)))
        whole = float(now.cuts.weight(batch))
        shares = [float(now.cuts.weight(piece)) / whole if whole else 0.0 for piece in here]
        slices = [
            replace(one, share=share * one.share)
            for piece, share in zip(here, shares, strict=True)
            for one in now.cuts.slices(now, piece)
        ]
        everybody = in_slices(self.orders(len(here)), len(slices) // len(here))
        order, self.unread = everybody[self.link.rank], buffer_needed(everybody)
        final = max(
            (number for number, one in enumerate(order) if one.kind in (Kind.BACKWARD, Kind.WEIGHTS)), default=-1
        )
        total = torch.zeros((), device=device)
        ended = (
            not now.last or not self.weights.own_weights
        )  # True: nobody waits for a backward that makes no gradients
        self.spans = []
        for number, action in enumerate(order):
            yield action
            part = replace(now, last=now.last and number == final)
            self.begun, one = time.perf_counter(), slices[action.piece]
            with one.within():
                if action.kind is Kind.FORWARD:
                    loss = self.forward_piece(part, one.batch, one.share, action)
                    total = total if loss is None else total + loss
                elif self.backward_piece(part, action):
                    ended = ended or part.last
        if not ended:  # the last action had nothing to do: its weights are frozen, or their gradients were made before
            now.backward(now, torch.zeros((), device=device, requires_grad=True))
        self.total = total

    def taken_total(self) -> Tensor:
        total, self.total = self.total, None
        assert total is not None, "all actions of a batch are done"
        return total

    def forward_piece(self, now: Run, piece: Batch, share: float, action: Action) -> Tensor | None:
        """Run one micro-batch through one chunk; returns its loss if the model ends there."""
        inputs: list[Tensor] = []

        def bring(absents: Sequence[Tensor]) -> list[Tensor]:
            if not torch.is_grad_enabled() and any(value.gradient for value in walk.takes):
                raise Mistake(
                    f"a stage begins with {self.parts.name_of(self.ranges[action.chunk].start)}, which the model "
                    f"calls where no gradients are recorded (in torch.no_grad, say), and what arrives there needs one: cut "
                    f"elsewhere (balance=)"
                )
            found = self.receive_inputs(absents, walk.takes, action)
            inputs.extend(one for one in found if one.requires_grad)
            return [
                one.clone() if value.written and one.requires_grad else one
                for one, value in zip(found, walk.takes, strict=True)
            ]

        walk = self.walk = Walk(self.parts, self.ranges[action.chunk], bring)
        with self.norms.noting(action.piece, action.chunk):
            output = now.forward(now.model, piece)
        self.walk = None
        loss = None
        if isinstance(output, CutValues):
            root = self.beginning(output.values, walk.gives, action)
        else:
            with walk:
                root = weighted_loss(now.loss(output, piece), share)
            if root.numel() != 1:
                raise Mistake(
                    f"the job's loss gave a tensor of shape {tuple(root.shape)}: it must be one number, the mean over the batch"
                )
            loss = root.detach()
        walk.forget()
        self.spans.append(ActionSpan(action, self.begun, time.perf_counter()))
        assert root is not None or not inputs, (
            "a stage that gets no gradient over the next cut sends none back over this one"
        )
        self.flights[action.piece, action.chunk] = PieceInFlight(inputs, root)
        if isinstance(output, CutValues):
            self.hand_on(output.values, action)
        return loss

    def receive_inputs(self, absents: Sequence[Tensor], values: Sequence[Value], action: Action) -> list[Tensor]:
        found = []
        for number, (like, value) in enumerate(zip(absents, values, strict=True)):
            arrived = (
                self.room(like.shape, like.dtype, like.device) if isinstance(like, Absent) else self.same_room(like)
            )
            self.receive(
                arrived,
                action.chunk - 1,
                self.tag(Kind.FORWARD, action.piece, action.chunk, number),
                f"what {self.parts.name_of(self.ranges[action.chunk].start - 1)} gives on",
            )
            found.append(arrived.to(like.device).requires_grad_(value.gradient and torch.is_grad_enabled()))
        self.begun = time.perf_counter()
        return found

    def room(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a message. It is made like a weight, so it is fake where weights are fake. In an imagined group
        nobody sends, so real memory holds zeros."""
        with unseen_functions():
            found = self.like.new_empty(shape, dtype=dtype, device=way_of(device))
            return found.zero_() if self.link.imagined else found

    def same_room(self, drawn: Tensor) -> Tensor:
        """The same for random numbers that this worker drew too, which serve as well in an imagined group."""
        with unseen_functions():
            return drawn.clone().to(way_of(drawn.device))

    def receive(self, into: Tensor, chunk: int, tag: int, what: str) -> None:
        """Receive a message from the worker of a chunk."""
        try:
            self.link.receive(into, self.home(chunk), tag)
        except PeerLost as error:
            raise type(error)(
                f"stage {self.link.rank} waited for {what}, from stage {self.home(chunk)}: {error}"
            ) from error

    def beginning(self, made: list[Tensor], values: Sequence[Value], action: Action) -> Tensor | None:
        """The scalar at which the backward of what crosses the next cut begins; None if no gradient comes back."""
        wanted = [(number, one) for number, (one, value) in enumerate(zip(made, values, strict=True)) if value.gradient]
        shapes = [(number, one.shape, one.dtype, one.device) for number, one in wanted]

        def bring() -> list[Tensor]:
            found = [self.room(shape, dtype, device) for _, shape, dtype, device in shapes]
            for (number, *_), arrived in zip(shapes, found, strict=True):
                self.receive(
                    arrived,
                    action.chunk + 1,
                    self.tag(Kind.BACKWARD, action.piece, action.chunk, number),
                    f"the gradient of what {self.parts.name_of(self.ranges[action.chunk].stop - 1)} gives on",
                )
            self.begun = time.perf_counter()
            return [arrived.to(device) for arrived, (*_, device) in zip(found, shapes, strict=True)]

        if any(not one.requires_grad for _, one in wanted):
            raise Mistake(
                f"what {self.parts.name_of(self.ranges[action.chunk].stop - 1)} gives asked for a gradient when one forward was "
                f"looked at, and does not now: what is frozen must not change while a model is cut into stages"
            )
        return begin_with(bring, [one for _, one in wanted]) if wanted else None

    def hand_on(self, made: list[Tensor], action: Action) -> None:
        """Send what crosses the next cut."""
        self.send([one.detach() for one in made], range(len(made)), action, Kind.FORWARD, action.chunk + 1)

    def send(self, made: Sequence[Tensor], numbers: Iterable[int], action: Action, kind: Kind, chunk: int) -> None:
        """Start to send to the worker of a chunk; the oldest messages over this cut have arrived by then."""
        way = self.on_the_way.setdefault((kind, action.chunk), deque())
        while len(way) >= self.unread:
            self.wait_for_oldest(way)
        named = chunk if kind is Kind.FORWARD else action.chunk - 1
        message = []
        for number, one in zip(numbers, made, strict=True):
            whole = one.contiguous().to(way_of(one.device))
            message.append(
                TensorInFlight(
                    whole, self.link.sending(whole, self.home(chunk), self.tag(kind, action.piece, named, number))
                )
            )
        way.append(message)

    def backward_piece(self, now: Run, action: Action) -> bool:
        """Run a backward; returns whether gradients of weights were computed."""
        key = action.piece, action.chunk
        flight = self.flights[key] if action.kind is Kind.INPUTS else self.flights.pop(key)
        if flight.root is None:
            return False
        if not flight.inputs and action.kind is Kind.INPUTS:  # nobody waits for it: do all of it with the weights
            return False
        reached = True
        if action.kind is Kind.WEIGHTS and flight.inputs:
            reached = self.backward_weights(now, flight)
        elif action.kind is Kind.INPUTS and goes_in_halves(flight.root):
            flight.rest, reached = to_inputs(flight.root, flight.inputs, self.weights.own_weights), False
        else:
            now.backward(now, flight.root)
            flight.root = None  # no second half is left
        self.spans.append(ActionSpan(action, self.begun, time.perf_counter()))
        if action.kind is not Kind.WEIGHTS:
            self.send_gradients(flight.inputs, action)
        return reached

    def backward_weights(self, now: Run, flight: PieceInFlight) -> bool:
        """The deferred gradients of weights, handed over by a separate backward so that hooks see them. Returns whether
        there were any."""
        assert flight.rest is not None, "its first half is done"
        reached = list(to_weights(flight.rest))
        if reached:
            now.backward(now, begin_with(lambda: [gradient for _, gradient in reached], [one for one, _ in reached]))
        return bool(reached)

    def send_gradients(self, inputs: list[Tensor], action: Action) -> None:
        """Send the gradients of a chunk's inputs to the worker that sent them."""
        numbers = [number for number, value in enumerate(self.takes(action.chunk)) if value.gradient]
        found = [one.grad if one.grad is not None else torch.zeros_like(one) for one in inputs]
        for one in inputs:
            one.grad = None
        self.send(found, numbers, action, Kind.BACKWARD, action.chunk - 1)

    def takes(self, chunk: int) -> Sequence[Value]:
        return self.chain.crossing[self.ranges[chunk].start]

    def home(self, chunk: int) -> int:
        return chunk % self.link.world

    def tag(self, kind: Kind, piece: int, chunk: int, value: int) -> int:
        return ((piece * len(self.ranges) + chunk) * 2 + (kind is Kind.BACKWARD)) * VALUES + value

    def wait_for_oldest(self, way: deque[list[TensorInFlight]]) -> None:
        """Wait until the oldest message has arrived."""
        for held in way.popleft():
            held.wait()

    def wait_for_sends(self) -> None:
        """Wait until everything sent has arrived."""
        for way in self.on_the_way.values():
            while way:
                self.wait_for_oldest(way)

    # What survives a restart

    @property
    def weights_elsewhere(self) -> Mapping[str, StoredTensor]:
        return self.weights.tensors()

    def whole_optimizer(self, own: dict[str, Any]) -> dict[str, Any]:
        return self.weights.whole_optimizer(own)

    def own_optimizer(self, whole: dict[str, Any]) -> dict[str, Any]:
        return self.weights.own_optimizer(whole)

    # Outside of a step

    @property
    def own_times(self) -> OwnTimes:
        return self.clock.times

    @contextmanager
    def together(self) -> Iterator[None]:
        """While inside, all workers may call the model at the same time: each computes its part."""
        yield

    @contextmanager
    def usable(self) -> Iterator[None]:
        """While inside, all weights are here."""
        self.weights.gather()
        self.gathered = True
        try:
            with self.run.outside.usable():  # techniques that divide weights further gather them now
                yield
        finally:
            self.gathered = False
            self.weights.release()

    def guarding(self) -> AbstractContextManager[object]:
        empty = (
            {storage_id_of(one): name for name, one in self.weights.by_name.items() if not self.weights.uses(name)}
            if not self.gathered
            else {}
        )

        def absent(leaf: Tensor) -> str:
            return (
                ""
                if leaf.untyped_storage().nbytes() or not leaf.numel()
                else empty.get(storage_id_of(leaf), "a buffer")
            )

        return Guard(absent, "with Pipeline a worker has the weights of its own stages; use a plan without it")

    def evaluate(self, model: nn.Module, batch: Batch) -> Any:
        """The model's output, on every worker: each computes its part, and the last sends the output to the others."""
        if self.gathered:
            return self.run.outside.evaluate(model, batch)
        output: Any = None
        last = len(self.ranges) - 1
        for chunk in self.chunks:
            action = Action(Kind.FORWARD, 0, chunk)
            walk = Walk(
                self.parts,
                self.ranges[chunk],
                lambda absents, action=action: self.receive_inputs(  # type: ignore[misc]
                    absents, self.takes(action.chunk), action
                ),
            )
            with walk.through():
                try:
                    output = self.run.outside.evaluate(model, batch)
                except PartComputed:
                    self.hand_on(walk.result(), action)
                    self.wait_for_sends()
        if last not in self.chunks:
            walk = Walk(self.parts, range(0), nothing)
            with walk.through():
                output = self.run.outside.evaluate(model, batch)
        return self.broadcast_output(output, walk)

    def broadcast_output(self, output: Any, walk: Walk) -> Any:
        """The last worker's output, sent to all."""
        last = len(self.ranges) - 1
        start, carried = self.ranges[last].start, {value.number for value in self.takes(last)}
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
                leaves[place] = self.room(leaf.shape, leaf.dtype, leaf.device)
                self.receive(leaves[place], last, 0, "the model's output")
        return tree_unflatten(leaves, structure)


class TensorInFlight:
    """A tensor being sent; kept alive until its transfer was waited for."""

    def __init__(self, tensor: Tensor, sending: Sending) -> None:
        self.tensor: Tensor | None = tensor
        self.sending = sending

    def wait(self) -> None:
        self.sending.wait()
        self.tensor, self.sending = None, CompletedWork()


def way_of(device: torch.device) -> torch.device:
    """The device through which messages between stages pass: host memory. Between GPUs messages have no tags and wait
    for each other in order, so two workers that send to each other at once would deadlock."""
    return torch.device("cpu") if device.type == "cuda" else device


def users(names: Sequence[frozenset[str]], homes: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """For every name, the workers that use it; `names` lists what each call uses, `homes` the worker of each call."""
    found: dict[str, set[int]] = {}
    for used, home in zip(names, homes, strict=True):
        for name in used:
            found.setdefault(name, set()).add(home)
    return {name: tuple(sorted(workers)) for name, workers in found.items()}
