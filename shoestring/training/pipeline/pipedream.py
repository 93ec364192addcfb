"""PipeDream: a pipeline that does not wait between batches. Weights move after the backward of every piece.

    stage s of S     forward of piece k, then backward of piece k - (S-1-s) and an update with its gradient; and so on over all batches
    forward          with the newest weights that the stage has. With vertical sync: with those of the version that the first stage had
                     when the piece entered
    backward         with the weights of the piece's own forward: every stage keeps those that pieces on their way began with (the stash)
    staleness        a gradient of stage s is applied after S-1-s updates that its forward did not know; with vertical sync, S-1 at all
    stash            S-1-s copies of the stage's weights beside the newest; with vertical sync, S-1 at all

What a batch is to plain training, a piece is here: its loss is the mean over the piece, and the learning rate is the job's. So a batch of
M pieces makes M updates, each with a gradient of 1/M of its samples, at the rate that the schedule gives for the batch in whose step the
backward happens. The loss of a step is the mean over the pieces whose backward it did, most of which are of this batch, and the first
of the one before; losses come back with the gradients.

Every few steps (`flush`), after the last, and after a batch of fewer pieces than stages, all backwards are done before the step ends: the
line drains. Only then have all stages made the same updates, and only then is saved, validated or stopped. What a stage does in which
order is fixed, so the result does not depend on how fast the workers are, and a run that goes on from a checkpoint ends with the same bits.
Narayanan et al.: PipeDream: Generalized Pipeline Parallelism for DNN Training, SOSP 2019, arXiv 1806.03377.
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

from shoestring.core.batch import Batch, moved
from shoestring.core.errors import Mistake
from shoestring.core.link import Link
from shoestring.core.private import storage_id_of, writes_unseen
from shoestring.core.run import Run, StoredTensor
from shoestring.training.pipeline.schedule import Action, Kind, staleness
from shoestring.training.pipeline.stages import VALUES, Stages
from shoestring.training.pipeline.step_clock import StepClock
from shoestring.training.pipeline.walk import Chain

LOSS = VALUES - 1  # the number of the loss among what crosses a cut backward
WINDOW = 1024  # pieces after which their numbers in messages begin again; far more than are ever on their way


@dataclass
class Underway:
    """A piece between its forward and its backward in this stage."""

    number: int  # among all that were computed
    version: int  # of the weights that it uses
    loss: Tensor | None  # known where the model ends


class Versions:
    """The weights of a stage: the newest, and older ones that are still used. A version is the number of updates before it."""

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        self.weights = tuple(weights)
        self.newest = 0
        self.older: dict[int, list[Tensor]] = {}
        self.most = 0  # bytes that older ones took at once

    @contextmanager
    def used(self, version: int) -> Iterator[None]:
        """While inside, the weights have the numbers of a version."""
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
        """Update the newest weights; versions from `needed` on are used later.

        What autograd has saved of a weight that is kept is not written to, because the newest numbers get a storage of their own. It
        counts writes by weight, though, so these are not shown to it.
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
    """One worker's part of such a pipeline."""

    def __init__(
        self, run: Run, link: Link, bounds: Callable[[Chain], Sequence[range]], pieces: int, flush: int, vertical: bool
    ) -> None:
        if run.clip:
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
        self.underway: deque[Underway] = deque()
        self.entered = self.drained_at = 0  # pieces so far; and when the line drained
        self.step = 0
        self.due = True  # the line drains in this step
        self.now = run  # the run as it was in the last step, for who drains after it
        self.loss: Tensor | None = None  # of the piece whose backward is done now

    # The step

    def gradients(self, now: Run, batch: Batch) -> Tensor:
        device = next(iter(self.weights.own_weights or self.weights.by_name.values())).device
        here = now.pieces(moved(batch, device), min(self.pieces, now.count(batch)))
        self.step += 1
        self.due = self.step % self.flush == 0 or self.step >= self.run.steps or len(here) < self.link.world
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
        """The version of the weights that a piece uses in its forward."""
        behind = self.link.world - 1 if self.vertical else self.lag
        return max(self.drained_at, number - behind)

    def enter(self, now: Run, piece: Batch) -> None:
        """The forward of a piece."""
        number, version = self.entered, self.version_of(self.entered)
        self.begun = time.perf_counter()
        with self.versions.used(version):
            loss = self.forward_piece(now, piece, 1.0 if now.weight(piece) else 0.0, self.action(Kind.FORWARD, number))
        self.underway.append(Underway(number, version, None if loss is None else loss.float().reshape(())))
        self.entered += 1

    def leave(self, now: Run, needed: int) -> Tensor:
        """The backward of the piece that has been on its way for longest, and the update; gives its loss. Pieces to come use weights from
        the version `needed` on."""
        piece = self.underway.popleft()
        action = self.action(Kind.BACKWARD, piece.number)
        loss = self.loss = piece.loss if piece.loss is not None else self.received_loss(action)
        with self.versions.used(piece.version):
            silent = self.flights[action.piece, action.chunk].root is None
            self.begun = time.perf_counter()
            self.backward_piece(now, action)
        if silent:  # nothing wants a gradient here: the loss goes on all the same
            self.send((), (), action, Kind.BACKWARD, action.chunk - 1)
        self.versions.move(lambda: self.run.update(now), min([needed, *(one.version for one in self.underway)]))
        for one in self.weights.own_weights:
            one.grad = None
        return loss

    def drain(self) -> list[Tensor]:
        """Finish all pieces that are on their way: then every stage has made as many updates."""
        losses = []
        while self.underway:
            losses.append(self.leave(self.now, self.entered))
        self.arrived()
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
        """As every pipeline does; backward, the loss goes with the gradients."""
        if kind is Kind.FORWARD or action.chunk == 0:
            super().send(made, numbers, action, kind, chunk)
        else:
            assert self.loss is not None, "it came before this backward began"
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
    def kept(self) -> Mapping[str, StoredTensor]:
        """All workers ask for it, for weights of one version: where data ended before the step that was to be the last, the line drains."""
        self.drain()
        return super().kept

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "stash_bytes": self.versions.most}  # nothing is on its way when it is asked for

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state.get("step", 0)  # another schedule has none
        self.versions.most = state.get("stash_bytes", 0)

    @property
    def remark(self) -> str:
        stages = range(self.link.world)
        stale = [self.link.world - 1 if self.vertical else staleness(self.link.world, stage) for stage in stages]
        return (
            f"pipedream: weights move after every piece, {self.pieces} times a batch at the job's learning rate, and the gradients of "
            f"stages {', '.join(map(str, stages))} are {', '.join(map(str, stale))} updates late; the line drains every {self.flush} "
            f"steps, and only then is saved, validated or stopped"
        )


CLIPS = (
    "the job clips gradients by their global norm, and with schedule='pipedream' the stages have the gradients of a piece at "
    "different times: use schedule='1f1b', or a job without clip"
)


def refuse_views(model: nn.Module, weights: Sequence[nn.Parameter]) -> None:
    """A tensor of the model that shares memory with a weight would not follow it: the newest weights get memory of their own."""
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
