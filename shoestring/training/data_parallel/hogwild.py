"""Hogwild: weights in memory shared by all workers of a machine; each worker steps them with its own gradients and
moments, without locks.

Two simultaneous steps may overwrite parts of each other, and a checkpoint holds whatever the workers had written by
then. Only the counters have a lock: which parts of batches are taken, and how stale a gradient is.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoestring.core.batch import Batch
from shoestring.core.errors import Mistake
from shoestring.core.optimization.schedule import Schedule
from shoestring.core.private import number_of
from shoestring.core.running.run import Run
from shoestring.core.running.run_state import RunState
from shoestring.core.workers.assignment import Assignment, Batches
from shoestring.core.workers.link import GroupDone, Link, PeerLost
from shoestring.training.data_parallel.data_parallel import trained_parameters
from shoestring.training.data_parallel.learning_rate import rate_times
from shoestring.training.data_parallel.parameter_server.pushes import Pushes, may_begin
from shoestring.training.links.shared_memory import Shared

IDLE = -1  # in place of a version: the worker computes nothing now
PAUSE = 0.0005  # seconds between two looks at the counters
LONG = 1 << 60  # more steps than any run has


class SharedCounts:
    """Counters in shared memory."""

    def __init__(self, numbers: np.ndarray[Any, Any], world: int, delay: int) -> None:
        counts = numbers[: 8 * (2 + world * (delay + 2))].view(np.int64)
        self.head = counts[:2]  # the next part to take, and whether training is over
        rows = counts[2:].reshape(world, delay + 2)
        self.begun, self.staleness = (
            rows[:, 0],
            rows[:, 1:],
        )  # per worker: the version it computes on, and its steps by staleness
        self.losses = (
            numbers[counts.nbytes :].view(np.float64).reshape(world, 2)
        )  # and the sums of loss x weight and of weight

    @staticmethod
    def size(world: int, delay: int) -> int:
        return 8 * (2 + world * (delay + 2)) + 16 * world

    @property
    def version(self) -> int:
        """The version of the weights: the number of updates by all workers."""
        return int(self.staleness.sum())


class Hogwild(RunState, Assignment):
    """One worker's side of Hogwild."""

    asynchronous = True

    def __init__(self, run: Run, link: Link, delay: int, corrected: bool) -> None:
        self.run, self.link, self.rank, self.parts, self.delay = run, link, link.rank, link.world, delay
        self.before = Pushes(corrected)  # counted before the checkpoint that this run resumed from
        statistics = [
            buffer for buffer in run.model.buffers() if buffer.is_floating_point()
        ]  # integer counts stay each worker's own
        self.shared = Shared(link, trained_parameters(run), SharedCounts.size(self.parts, delay))
        if statistics:
            Shared(link, statistics)
        self.counts = SharedCounts(self.shared.numbers, self.parts, delay)
        self.counts.begun[:] = IDLE
        self.feed: Batches | None = None  # the source of this worker's samples, set with its first part
        self.stale: int | None = None  # staleness of the gradient that waits for its update
        self.first, self.target = (
            0,
            0,
        )  # the batch it began with; the version at which the first worker's step is done
        self.seen, self.loss = np.zeros(2), 0.0

    # Parts of batches

    @property
    def counts_steps(self) -> bool:
        return self.rank == 0

    def steps_done(self, own: int, before: int) -> int:
        """For the first worker its steps; another worker counts parts, and a step is as many parts as all workers
        take."""
        return (
            own if self.rank == 0 else min(before + self.counts.version // self.parts, self.run.settings.steps or LONG)
        )

    def next(self, feed: Batches) -> tuple[int, int | None]:
        """The next part. None for the first worker if the others did the whole step meanwhile, or took its last
        parts."""
        if self.feed is None:
            self.feed, self.first = feed, feed.taken
            self.counts.head[0] = feed.taken * self.parts
            self.wait_for_all()  # nobody begins while another worker still loads a checkpoint into the weights
        if self.rank == 0:
            number = self.first + self.target // self.parts
            self.target += self.parts
            if self.counts.version >= self.target:
                return number, None
            later, part = self.take(feed)
            with suppress(StopIteration):
                feed.part(later, None)
                return later, part
            return number, None
        if self.counts.head[1]:
            raise GroupDone
        return self.take(feed)

    def take(self, feed: Batches) -> tuple[int, int]:
        if self.link.imagined:
            return feed.taken, self.rank
        with self.lock():
            self.counts.head[0] += 1
            return divmod(int(self.counts.head[0]) - 1, self.parts)

    def compute(self, now: Run, batch: Batch) -> Tensor:
        """Compute a part's gradient and note its staleness; no gradient if the part has no samples."""
        self.begin()
        loss = torch.zeros(()) if self.idle else self.run.gradients(now, batch)
        weight = 0.0 if self.idle else float(self.run.cuts.weight(batch))
        self.counts.losses[self.rank] += number_of(loss) * weight, weight
        self.stale = self.counts.version - int(self.counts.begun[self.rank])
        return loss

    def begin(self) -> None:
        """Begin on the present weights; wait if that could make somebody's gradient too stale."""
        until = time.monotonic() + self.link.deadline
        while True:
            with self.lock():
                out = [version for version in self.counts.begun.tolist() if version != IDLE]
                if may_begin(self.counts.version, out, self.delay):
                    self.counts.begun[self.rank] = self.counts.version
                    return
            self.pause(until)

    def pause(self, until: float) -> None:
        """Wait a little for others; raise PeerLost if that took too long."""
        if time.monotonic() > until:
            begun = {rank: version for rank, version in enumerate(self.counts.begun.tolist()) if version != IDLE}
            who = f"worker {min(begun, key=begun.__getitem__)}" if begun else "another worker"
            raise PeerLost(f"{who} did not come with its gradient within {self.link.deadline:.0f} s")
        time.sleep(PAUSE)

    def update(self, now: Run) -> None:
        """Step the weights with the waiting gradient, if there is one."""
        if self.stale is None:
            return
        with rate_times(now.optimizer, 1 / max(self.stale, 1) if self.before.corrected else 1.0):
            self.run.update(now)
        with self.lock():
            self.counts.staleness[self.rank, self.stale] += 1
            self.counts.begun[self.rank] = IDLE
        self.stale = None

    def step(self, now: Run, batch: Batch) -> Tensor:
        """The first worker's step: as many parts as a batch has, whoever computes them. The loop does the last
        update."""
        if batch is not None:
            self.compute(now, batch)
        until = time.monotonic() + self.link.deadline
        while self.counts.version + (self.stale is not None) < self.target and not self.link.imagined:
            now.update(now)
            now.optimizer.zero_grad(set_to_none=True)
            assert self.feed is not None, "a step begins with a part"
            try:
                self.compute(now, self.feed.part(*self.take(self.feed)))
            except StopIteration:  # the others took the last parts
                self.pause(until)
        losses, weights = (total := self.counts.losses.sum(0)) - self.seen
        if weights > 0:
            self.seen, self.loss = total, losses / weights
        return torch.tensor(self.loss)

    # The group

    @contextmanager
    def lock(self) -> Iterator[None]:
        if self.shared.file is None:
            yield
            return
        fcntl.flock(self.shared.file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self.shared.file, fcntl.LOCK_UN)

    def wait_for_all(self) -> None:
        """Wait for all workers. The bytes sent for that belong to no step."""
        self.link.begin_sum(torch.zeros(1)).wait()

    def end(self) -> None:
        """Mark training as over if this is the first worker, and wait until all have stopped."""
        if self.rank == 0:
            self.counts.head[1] = 1
        if self.feed is None:  # this worker never got a part
            self.wait_for_all()
        self.wait_for_all()

    # Checkpoint state

    def state_dict(self) -> dict[str, Any]:
        whole = Pushes(self.before.corrected)
        whole.load_state_dict(self.before.state_dict())
        for rank, row in enumerate(self.counts.staleness.tolist()):
            for staleness, count in enumerate(row):
                whole.add(rank, staleness, count)
        return whole.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.before.load_state_dict(state)


def hogwild_run(run: Run, link: Link, delay: int, corrected: bool) -> Run:
    schedule = run.state.get("schedule")
    if isinstance(schedule, Schedule) and schedule.unit == "validations":
        raise Mistake(
            "Asynchronous(kind='hogwild') with a schedule that waits for a plateau: the first worker validates, and every worker "
            "has a rate of its own, which would stay; give kind='server', where the first one moves the weights"
        )
    engine = Hogwild(run, link, delay, corrected)
    return replace(
        run,
        gradients=engine.compute if link.rank else engine.step,
        update=engine.update,
        team=replace(run.team, assignment=engine),
        state={**run.state, "pushes": engine},
    )
