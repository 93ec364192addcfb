"""PipeDream: a pipeline that does not drain between batches. Weights are updated after every micro-batch's backward.

    stage s of S     forward of micro-batch k, then backward of micro-batch k - (S-1-s) and an update with its gradient; over all batches
    forward          with the stage's newest weights. With vertical sync: with the version that the first stage had when the
                     micro-batch entered
    backward         with the weights of the micro-batch's own forward: every stage keeps those of micro-batches in flight (the stash)
    staleness        a gradient of stage s is S-1-s updates late; with vertical sync, S-1 at every stage
    stash            S-1-s copies of the stage's weights beside the newest; with vertical sync, S-1 at every stage

A micro-batch takes the role of a batch: its loss is the mean over the micro-batch, and the learning rate is the job's.
So a batch of M micro-batches makes M updates, each with the gradient of 1/M of its samples, at the rate that the
schedule gives for the batch in whose step the backward happens. The loss of a step is the mean over the micro-batches
whose backward it did: most belong to this batch, the first ones to the previous batch. Losses travel back with the
gradients.

The pipeline drains (all backwards are done before the step ends) every `flush` steps, after the last step, and after a
batch of fewer micro-batches than stages. Only then have all stages made the same updates, so only then can a run be
saved, validated or stopped. The order of a stage's work is fixed, so the result does not depend on how fast the workers
are, and a resumed run ends with the same bits.
Narayanan et al.: PipeDream: Generalized Pipeline Parallelism for DNN Training, SOSP 2019, arXiv 1806.03377.

Contract: `RunTeam.synchronised` is true after steps in which the line drained, and whoever wants weights of one version
asks with all workers (tests/training/pipeline/test_pipedream.py).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.core.batch import Batch, to_device
from shoestring.core.errors import Mistake
from shoestring.core.private import storage_id_of, writes_unseen
from shoestring.core.running.run import Run
from shoestring.core.running.run_state import StoredTensor
from shoestring.core.workers.actions import Action, Kind
from shoestring.core.workers.link import Link
from shoestring.training.pipeline.schedule import staleness
from shoestring.training.pipeline.stages.stages import VALUES, Stages
from shoestring.training.pipeline.stages.step_clock import StepClock
from shoestring.training.pipeline.stages.walk import Chain

LOSS = VALUES - 1  # the loss's number among the values that cross a cut backward
WINDOW = 1024  # micro-batch numbers in messages wrap around after so many; far more than are ever in flight


@dataclass
class StashedPiece:
    """A micro-batch between its forward and its backward in this stage."""

    number: int  # counts all micro-batches of the run
    version: int  # of the weights that it uses
    loss: Tensor | None  # known at the last stage


class Versions:
    """A stage's weights: the newest, and older versions still in use. A version is the number of updates before it."""

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        self.weights = tuple(weights)
        self.newest = 0
        self.older: dict[int, list[Tensor]] = {}
        self.most = 0  # largest number of bytes that older versions took

    @contextmanager
    def using(self, version: int) -> Iterator[None]:
        """While inside, the weights have the values of this version."""
        if version == self.newest:
            yield
            return
        newest = [one.data for one in self.weights]
        self.put(self.older[version])
        try:
            yield
        finally:
            self.put(newest)

    def put(self, numbers: Iterable[Tensor]) -> None:
        for one, value in zip(self.weights, numbers, strict=True):
            one.data = value

    def move(self, update: Callable[[], None], needed: int) -> None:
        """Update the newest weights; later work needs versions from `needed` on.

        The newest weights get new storage, so tensors that autograd saved of older versions are not overwritten.
        Autograd counts writes per weight, though, so these writes are hidden from it.
        """
        if needed <= self.newest:
            self.older[self.newest] = [one.data for one in self.weights]
            self.put([one.data.clone() for one in self.weights])
        with writes_unseen(self.weights):
            update()
        self.newest += 1
        for version in [version for version in self.older if version < needed]:
            del self.older[version]
        self.most = max(self.most, sum(one.nbytes for numbers in self.older.values() for one in numbers))


class PipeDream(Stages):
    """One worker's part of a PipeDream pipeline."""

    def __init__(
        self, run: Run, link: Link, bounds: Callable[[Chain], Sequence[range]], pieces: int, flush: int, vertical: bool
    ) -> None:
        if run.settings.clip:
            raise Mistake(CLIPS)
        super().__init__(run, link, bounds, lambda count: (), pieces)
        if self.weights.tied:
            name, users = next(iter(sorted(self.weights.tied.items())))
            raise Mistake(
                f"Pipeline(schedule='pipedream'): the weight {name} is used by the stages {', '.join(map(str, users))}, whose "
                f"updates happen at different times, so their copies of it would go apart: use schedule='1f1b', which adds "
                f"their gradients up, or do not tie weights"
            )
        refuse_views(run.model, self.weights.own_weights)
        self.clock = StepClock(link.same_machine, drains=False)
        self.flush, self.vertical = flush, vertical
        self.lag = staleness(link.world, link.rank)
        self.versions = Versions(self.weights.own_weights)
        self.underway: deque[StashedPiece] = deque()
        self.entered = self.drained_at = 0  # micro-batches so far; that number when the pipeline drained last
        self.step = 0
        self.due = True  # whether the pipeline drains in this step
        self.now = run  # the run as of the last step, for a drain after it
        self.loss: Tensor | None = None  # of the micro-batch whose backward is running

    # One step

    def gradients(self, now: Run, batch: Batch) -> Tensor:
        device = next(iter(self.weights.own_weights or self.weights.by_name.values())).device
        here = now.cuts.pieces(to_device(batch, device), min(self.pieces, now.cuts.count(batch)))
        self.step += 1
        self.due = self.step % self.flush == 0 or self.step >= self.run.settings.steps or len(here) < self.link.world
        self.now = now = replace(now, last=True)
        self.spans = []
        losses = []
        for piece in here:
            self.enter(now, piece)
            if len(self.underway) > self.lag:
                losses.append(self.leave(now, self.version_of(self.entered)))
        if self.due:
            losses += self.drain()
        self.clock.note(self.spans)
        return torch.stack(losses).mean()

    def version_of(self, number: int) -> int:
        """The version of the weights that a micro-batch's forward uses."""
        behind = self.link.world - 1 if self.vertical else self.lag
        return max(self.drained_at, number - behind)

    def enter(self, now: Run, piece: Batch) -> None:
        """The forward of a micro-batch."""
        number, version = self.entered, self.version_of(self.entered)
        self.begun = time.perf_counter()
        with self.versions.using(version):
            loss = self.forward_piece(
                now, piece, 1.0 if now.cuts.weight(piece) else 0.0, self.action(Kind.FORWARD, number)
            )
        self.underway.append(StashedPiece(number, version, None if loss is None else loss.float().reshape(())))
        self.entered += 1

    def leave(self, now: Run, needed: int) -> Tensor:
        """The backward of the oldest micro-batch in flight, and the update; returns its loss. Later micro-batches use
        weight versions from `needed` on."""
        piece = self.underway.popleft()
        action = self.action(Kind.BACKWARD, piece.number)
        loss = self.loss = piece.loss if piece.loss is not None else self.received_loss(action)
        with self.versions.using(piece.version):
            silent = self.flights[action.piece, action.chunk].root is None
            self.begun = time.perf_counter()
            self.backward_piece(now, action)
        if silent:  # no value here needs a gradient, but the loss must travel on
            self.send((), (), action, Kind.BACKWARD, action.chunk - 1)
        self.versions.move(lambda: self.run.update(now), min([needed, *(one.version for one in self.underway)]))
        for one in self.weights.own_weights:
            one.grad = None
        return loss

    def drain(self) -> list[Tensor]:
        """Finish all micro-batches in flight; then every stage has made equally many updates."""
        losses = []
        while self.underway:
            losses.append(self.leave(self.now, self.entered))
        self.wait_for_sends()
        self.drained_at = self.entered
        return losses

    def action(self, kind: Kind, number: int) -> Action:
        return Action(kind, number % WINDOW, self.link.rank)

    def received_loss(self, action: Action) -> Tensor:
        loss = self.room(torch.Size(), torch.float32, self.like.device)
        self.receive(
            loss, action.chunk + 1, self.tag(Kind.BACKWARD, action.piece, action.chunk, LOSS), "the loss of a piece"
        )
        return loss

    def send(self, made: Sequence[Tensor], numbers: Iterable[int], action: Action, kind: Kind, chunk: int) -> None:
        """As in every pipeline; in backward, the loss travels with the gradients."""
        if kind is Kind.FORWARD or action.chunk == 0:
            super().send(made, numbers, action, kind, chunk)
        else:
            assert self.loss is not None, "the loss came before this backward began"
            super().send([*made, self.loss], [*numbers, LOSS], action, kind, chunk)

    # Between steps

    @contextmanager
    def usable(self) -> Iterator[None]:
        self.drain()
        with super().usable():
            yield

    @contextmanager
    def together(self) -> Iterator[None]:
        self.drain()
        yield

    @property
    def weights_elsewhere(self) -> Mapping[str, StoredTensor]:
        """The weights of one version, requested by all workers; drains first if the data ended before the planned last
        step."""
        self.drain()
        return super().weights_elsewhere

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "stash_bytes": self.versions.most}  # nothing is in flight when this is called

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state.get("step", 0)  # another schedule saves none
        self.versions.most = state.get("stash_bytes", 0)

    @property
    def remark(self) -> str:
        stages = range(self.link.world)
        stale = [self.link.world - 1 if self.vertical else staleness(self.link.world, stage) for stage in stages]
        return (
            f"pipedream: weights are updated after every micro-batch, {self.pieces} times a batch at the job's learning rate, and the "
            f"gradients of stages {', '.join(map(str, stages))} are {', '.join(map(str, stale))} updates late; the pipeline drains every "
            f"{self.flush} steps, and the run is saved, validated or stopped only then"
        )


CLIPS = (
    "the job clips gradients by their global norm, and with schedule='pipedream' the stages have a micro-batch's gradients at "
    "different times: use schedule='1f1b', or a job without clip"
)


def refuse_views(model: nn.Module, weights: Sequence[nn.Parameter]) -> None:
    """Refuse tensors that share memory with a weight: the newest weights get memory of their own, which such a tensor
    would miss."""
    own = {storage_id_of(one): one for one in weights}
    named = {id(one): name for name, one in model.named_parameters()}
    for path, module in model.named_modules():
        beside = [(name, one) for name, one in vars(module).items() if isinstance(one, Tensor)]
        for name, one in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False), *beside):
            if one.layout is torch.strided and (found := own.get(storage_id_of(one))) is not None and found is not one:
                raise Mistake(
                    f"Pipeline(schedule='pipedream'): {path + '.' if path else ''}{name} shares memory with the weight "
                    f"{named[id(found)]}, of which several versions are kept here, and it would not follow them: make it when it "
                    f"is used, or use schedule='1f1b'"
                )
