"""The parameter server: the first worker keeps the weights and the optimizer, the others compute gradients.

    worker   ask  -> which batch, which part of it     pull -> version, weights     push: version, loss, weight, gradients
    server   answers messages in the order they come; a request that must wait is answered later

A gradient is pushed when backward is done, so that nobody waits for half of one. Statistics that layers keep (batch
norm's) are each worker's own; the server has those that came last.
Li et al.: Scaling Distributed Machine Learning with the Parameter Server, 2014 (OSDI).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Protocol

import torch
from torch import Tensor, nn

from shoestring.core.errors import Mistake
from shoestring.core.running.run import Run
from shoestring.core.workers.assignment import Assignment, Batches
from shoestring.core.workers.link import Link
from shoestring.training.data_parallel.data_parallel import Statistics, trained_parameters
from shoestring.training.data_parallel.parameter_server.pushes import Pushes
from shoestring.training.data_parallel.reducer import Bucket, make_buckets, part_of

ASK, PULL, PUSH, DONE = range(4)  # the kind of a worker's message; DONE: it has no more data
FINISHED = -1  # sent in place of an answer


@dataclass
class Push:
    """A gradient that arrived."""

    rank: int
    staleness: int
    loss: float
    weight: float  # weight of the samples that it averages
    used: set[nn.Parameter]  # the weights that have a gradient
    flats: list[Tensor]  # the gradients, in buckets


class WaitPolicy(Protocol):
    """Decides who gets which part of which batch, and who has to wait."""

    def next_part(self, server: AssignmentServer, rank: int) -> tuple[int, int]: ...
    def may_go_on(self, server: AssignmentServer, rank: int, kind: int) -> bool: ...


class AssignmentServer(Assignment):
    """The parameter server, run by the first worker."""

    asynchronous = True

    def __init__(self, run: Run, link: Link, rule: WaitPolicy, pushes: Pushes) -> None:
        self.run, self.rule, self.link, self.pushes = run, rule, link, pushes
        self.parts = link.world - 1
        self.weights = trained_parameters(run)
        self.buckets = [Bucket(members) for members in make_buckets(self.weights)]
        self.statistics = Statistics(run.model, link, counts=True)
        self.version = 0  # of the weights
        self.batch = 0  # the loop's present batch
        self.computing: dict[int, int] = {}  # computing worker -> the version it computes on
        self.last_push: dict[int, int] = {}  # worker -> the version of its last push
        self.waiting: list[tuple[int, int]] = []  # requests that wait: (worker, kind)
        self.loss: float | None = None  # of the last step

    def next(self, feed: Batches) -> tuple[int, int | None]:
        """No samples: the server needs none. It only follows the workers' position in the data, for checkpoints."""
        self.batch = feed.taken
        return feed.taken, None

    def next_push(self) -> Push:
        """Answer workers until one of them pushes."""
        self.run.optimizer.zero_grad(set_to_none=True)
        while True:
            self.answer()
            rank, kind, version, loss, weight = self.next_message()
            if kind == PUSH:
                return self.receive_push(rank, version, loss, weight)
            self.waiting.append((rank, kind))

    def answer(self) -> None:
        """Answer the waiting workers that may go on."""
        for rank, kind in list(self.waiting):
            if kind == DONE or not self.rule.may_go_on(self, rank, kind):
                continue
            self.waiting.remove((rank, kind))
            if kind == ASK:
                self.reply(rank, *self.rule.next_part(self, rank))
                self.waiting += [(rank, PULL)] if self.link.imagined else []
                continue
            self.computing[rank] = self.version
            self.reply(rank, self.version)
            for bucket in self.buckets:
                for parameter in bucket.members:
                    bucket.view(parameter).copy_(parameter.detach())
                self.link.send(bucket.buffer, rank)
                bucket.flat = None

    def reply(self, rank: int, first: int, second: int = 0) -> None:
        self.link.send(torch.tensor([first, second]), rank)

    def next_message(self) -> tuple[int, int, int, float, float]:
        """The next message, whoever it is from: rank, kind, version, loss, weight."""
        if self.link.imagined:  # all are equally fast: whoever may go on does, and who began first is done first
            busy = {rank for rank, _ in self.waiting} | self.computing.keys()
            self.waiting += [(rank, ASK) for rank in range(1, self.link.world) if rank not in busy]
            self.answer()
            self.answer()  # workers that were assigned a part
            rank = next(iter(self.computing))
            return rank, PUSH, self.computing[rank], 0.0, 1.0
        head = torch.empty(4, dtype=torch.float64)
        rank = self.link.receive(head)
        kind, version, loss, weight = head.tolist()
        return rank, int(kind), int(version), loss, weight

    def receive_push(self, rank: int, version: int, loss: float, weight: float) -> Push:
        """Receive the rest of a push."""
        self.computing.pop(rank, None)
        self.last_push[rank] = version
        flags = torch.tensor(
            [True] * len(self.weights) + self.statistics.norms(), dtype=torch.uint8
        )  # the default, unless the message says otherwise
        self.link.receive(flags, rank)
        found = flags.tolist()
        used = set(compress(self.weights, found))
        flats = [bucket.members[0].data.new_empty(bucket.size) for bucket in self.buckets] if used else []
        for flat in flats:
            self.link.receive(flat, rank)
        changed = list(compress(self.statistics.buffers, found[len(self.weights) :]))
        if changed:
            flat = changed[0].new_empty(sum(buffer.numel() for buffer in changed), dtype=self.statistics.dtype)
            self.link.receive(flat, rank)
            self.statistics.put(changed, flat)
        return Push(rank, self.version - version, loss, weight, used, flats)

    def set_gradients(self, used: set[nn.Parameter], flats: list[Tensor]) -> None:
        """Move gradients to the weights' `.grad`."""
        for bucket, flat in zip(self.buckets, flats, strict=False):
            for parameter in bucket.members:
                parameter.grad = part_of(flat, bucket.offsets[parameter], parameter) if parameter in used else None
        flats.clear()

    def mean(self, pushes: Sequence[tuple[float, float]]) -> Tensor:
        """The mean of (loss, weight) by weight. If no worker had samples in this step, the last step's loss."""
        whole = sum(weight for _, weight in pushes)
        if whole > 0:
            self.loss = sum(loss * weight for loss, weight in pushes) / whole
        elif self.loss is None:
            raise Mistake(
                f"the first batch has the weight {whole}: a mean over nothing; check the job's weight, or give larger batches"
            )
        return torch.tensor(self.loss)

    def end(self) -> None:
        """Tell every worker, when it next sends a message, that training is over; a push by then is too late."""
        working = set(range(1, self.link.world))
        while True:
            for rank, _ in self.waiting:
                self.reply(rank, FINISHED)
                working.remove(rank)
            self.waiting.clear()
            if not working:
                return
            rank, kind, version, loss, weight = self.next_message()
            if kind == PUSH:
                self.receive_push(rank, version, loss, weight)
            else:
                self.waiting.append((rank, kind))
