"""A worker of a parameter server: it asks for a part of a batch, pulls the newest weights, and pushes the gradient."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shoestring.core.batch import Batch
from shoestring.core.private import number_of
from shoestring.core.running.run import Run
from shoestring.core.running.run_state import DividesOptimizer, RunState
from shoestring.core.workers.assignment import Assignment, Batches
from shoestring.core.workers.link import CompletedWork, GroupDone, Link, Sending
from shoestring.training.data_parallel.data_parallel import Statistics, trained_parameters
from shoestring.training.data_parallel.parameter_server.server import ASK, DONE, FINISHED, PULL, PUSH
from shoestring.training.data_parallel.reducer import Bucket, Reducer, make_buckets, part_of


class Client(RunState, DividesOptimizer, Assignment):
    """A worker's side of the parameter server. It keeps no state: weights and optimizer are the server's."""

    asynchronous = True

    def __init__(self, run: Run, link: Link) -> None:
        self.link = link
        self.parts = link.world - 1
        self.weights = trained_parameters(run)
        self.reducer = Reducer([Bucket(members) for members in make_buckets(self.weights)], link, self.keep)
        self.statistics = Statistics(run.model, link, counts=True)
        self.flats: list[Tensor] = []  # the gradients, after backward
        self.version = 0  # of the weights it computes on
        self.finished = False

    def keep(self, bucket: Bucket) -> Sending:
        self.flats.append(bucket.buffer)
        return CompletedWork()

    @property
    def counts_steps(self) -> bool:
        return False

    def steps_done(self, own: int, before: int) -> int:
        """Always 0: the server counts steps, at its own rate."""
        return 0

    def next(self, feed: Batches) -> tuple[int, int | None]:
        if self.link.imagined:
            self.send_message(ASK)
            return feed.taken, self.link.rank - 1
        number, part = self.request(ASK)
        return number, part

    def request(self, kind: int) -> list[int]:
        """The server's answer, which may take time. Raises GroupDone if the group is done."""
        if self.finished:
            raise GroupDone
        self.send_message(kind)
        answer = torch.zeros(2, dtype=torch.int64)
        self.link.receive(answer, 0)
        found: list[int] = answer.tolist()
        if found[0] == FINISHED:
            self.finished = True
            raise GroupDone
        return found

    def send_message(self, kind: int, loss: float = 0.0, weight: float = 0.0) -> None:
        self.link.send(torch.tensor([kind, self.version, loss, weight], dtype=torch.float64), 0)

    def pull(self) -> None:
        """Get the newest weights."""
        self.version = self.request(PULL)[0]
        for bucket in self.reducer.buckets:
            flat = bucket.members[0].data.new_empty(bucket.size)
            self.link.receive(flat, 0)
            for parameter in bucket.members:
                parameter.detach().copy_(part_of(flat, bucket.offsets[parameter], parameter))

    def push(self, loss: float, weight: float) -> None:
        """Send the gradients and the layers' present statistics; nothing if this part had no samples."""
        changed = self.statistics.changed_buffers() if self.flats else [False] * len(self.statistics.buffers)
        flags = [parameter in self.reducer.used for parameter in self.weights] + changed
        self.send_message(PUSH, loss, weight)
        self.link.send(torch.tensor(flags, dtype=torch.uint8), 0)
        if self.reducer.used:
            for flat in self.flats:
                self.link.send(flat, 0)
        if any(changed):
            self.link.send(self.statistics.flat(changed), 0)
        self.flats.clear()
        self.reducer.used.clear()
        for parameter in self.weights:
            parameter.grad = None

    def end(self) -> None:
        """Wait until the others are done."""
        with suppress(GroupDone):
            self.request(DONE)

    # The server saves all state

    def whole_optimizer(self, own: dict[str, Any]) -> dict[str, Any]:
        return own

    def own_optimizer(self, whole: dict[str, Any]) -> None:
        return None


def client_run(run: Run, client: Client) -> Run:
    """The run of a worker that computes gradients for a server."""

    def backward(now: Run, value: Tensor) -> None:
        if not now.last:
            run.backward(now, value)
            return
        with client.reducer.listening():
            run.backward(now, value)

    def gradients(now: Run, batch: Batch) -> Tensor:
        client.pull()
        if client.idle:
            client.push(0.0, 0.0)
            return torch.zeros(())
        client.statistics.begin()
        loss = run.gradients(now, batch)
        client.push(number_of(loss), float(run.cuts.weight(batch)))
        return loss

    def update(now: Run) -> None:
        """Nothing: the server updates the weights."""

    return replace(
        run,
        gradients=gradients,
        backward=backward,
        update=update,
        team=replace(run.team, assignment=client),
        state={**run.state, "pushes": client},
    )
