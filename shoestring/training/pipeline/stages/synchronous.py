"""Stages that finish a batch within its step: every micro-batch goes through the pipeline, in the order of a schedule."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shoestring.core.batch import Batch, to_device
from shoestring.core.running.run import Run, add_up_shared
from shoestring.core.workers.actions import Action, Kind
from shoestring.core.workers.link import Link
from shoestring.training.pipeline.schedule import Orders, buffer_needed, in_slices
from shoestring.training.pipeline.stages.stages import Stages
from shoestring.training.pipeline.stages.walk import Chain


class SynchronousStages(Stages):
    """One worker's part of a pipeline that is empty after every step, so that its weights are updated once a batch."""

    def __init__(
        self,
        run: Run,
        link: Link,
        bounds: Callable[[Chain], Sequence[range]],
        orders: Callable[[int], Orders],
        pieces: int,
    ) -> None:
        super().__init__(run, link, bounds, pieces)
        self.orders = orders  # a function of the number of micro-batches
        self.total: Tensor | None = None  # the sum of the losses that ended here, until it is taken

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

    def drain(self) -> Sequence[Tensor]:
        return ()  # nothing is in flight between steps

    def beside_gradients(self, action: Action) -> Mapping[int, Tensor]:
        return {}
