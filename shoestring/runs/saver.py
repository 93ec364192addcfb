"""When to save, and saving beside training.

Training stands still only while the tensors are copied to the file; hashing and syncing happen in a thread. A save that fails
(a full disk, state that can't be written) costs a warning, and the next one is tried as planned. On a full disk an older checkpoint makes
room for it, down to the newest good one, which always stays.

Of a job that validates, the weights that were best there are saved when they are found, before training goes on. They are deleted when
newer ones are there and no checkpoint knows of them any more, so whatever a killed run goes back to, its best weights are there.

Contract: The best weights are deleted only when no checkpoint that is there knows of them, or on resume if they are of
a life that was given up (tests/runs/test_best.py).
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from shoestring.core.errors import CURES, Mistake
from shoestring.core.regular import not_a_folder
from shoestring.core.run_state import StoredTensor
from shoestring.runs.cadence import Cadence
from shoestring.runs.checkpoints import BEST, draft, make_room, prune, prune_best, publish
from shoestring.runs.event import Event, Saved, Warned
from shoestring.runs.packing import packed

FULL = (errno.ENOSPC, errno.EDQUOT)
SHARE = 0.03  # of the time, at most, goes into saving, unless the user asked for every so many steps


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint is made of."""

    step: int
    weights: Mapping[str, Tensor | StoredTensor]
    aliases: Mapping[str, str]  # weights that are others by another name
    state: Mapping[str, Any]


def gather_only(snapshot: Snapshot) -> None:
    """Take part in gathering what workers hold parts of, in the order in which the first worker, which alone writes, asks for it."""
    tensors: dict[str, Tensor | StoredTensor] = {}
    try:
        packed(snapshot.state, tensors, "state")
    except Mistake:  # nobody can write it, so nobody gathers
        return
    for value in (*snapshot.weights.values(), *tensors.values()):
        if not isinstance(value, Tensor) and not getattr(value, "gathered", True):
            for _ in value.pieces():
                pass


def trouble_with(error: OSError | Mistake, folder: Path) -> tuple[str, str]:
    """Why a checkpoint can't be saved in a folder, and what to do about it."""
    if in_the_way := not_a_folder(folder):
        return in_the_way, "move it away"
    if isinstance(error, Mistake):
        return str(error), "mend that"
    cure = "free some space" if error.errno in (*FULL, errno.EFBIG) else CURES.get(error.errno or 0, "mend that")
    return error.strerror or str(error), cure


class Saver:
    def __init__(
        self, folder: Path, cadence: Cadence, tell: Callable[[Event], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.folder, self.cadence, self.tell, self.clock = folder, cadence, tell, clock
        self.thread = ThreadPoolExecutor(1)
        self.pending: Future[None] | None = None
        self.last = clock()
        self.pause = 0.0  # seconds that training stood still for the last save
        self.saved_step = 0
        self.turn = 0  # how many times it was due, where that is every so many steps
        self.losses: list[float] = []  # since the last save
        self.on_disk: list[Callable[[], None]] = []  # to be called when a checkpoint is safe, before the next step
        self.by_loss = True  # the best checkpoint is the one after the least training loss; else validation finds it
        self.best: tuple[float, int] | None = None
        self.keep = cadence.keep  # checkpoints; fewer once the disk was full,
        self.keep_best = True  # and at last not the best one
        self.trouble = self.cure = ""  # why the last save failed, and what to do

    def due(self, step: int) -> bool:
        """Whether to save after this step. Where it can't be asked after every step (workers meet every few), the next time it is."""
        if self.cadence.steps:
            before, self.turn = max(self.turn, self.saved_step // self.cadence.steps), step // self.cadence.steps
            return self.turn > before
        if self.pending is not None and not self.pending.done():
            return False
        return self.clock() - self.last >= max(self.cadence.seconds, self.pause / SHARE)

    def save(self, take: Callable[[], Snapshot]) -> None:
        """Copy the state now, finish the checkpoint in the background."""
        self.wait()
        begun = self.clock()
        snapshot = None
        try:
            snapshot = take()
            path = draft(self.folder, snapshot.step, snapshot.weights, snapshot.state, snapshot.aliases)
        except (OSError, Mistake) as error:
            if snapshot is not None:
                gather_only(snapshot)
            self.failed(error)
            return
        finally:
            self.last = self.clock()
            self.pause = self.last - begun
        mean = sum(self.losses) / len(self.losses) if self.losses else float("inf")
        self.losses = []
        self.pending = self.thread.submit(self.finish, path, snapshot.step, self.pause, mean)
        if self.on_disk:
            self.wait()
            if self.saved_step == snapshot.step:
                for saved in self.on_disk:
                    saved()

    def finish(self, path: Path, step: int, pause: float, loss: float) -> None:
        try:
            checkpoint, size = publish(path)
        except OSError as error:
            self.failed(error)
            return
        self.saved_step = step
        if self.by_loss and (self.best is None or loss < self.best[0]):
            self.best = (loss, step)
        if self.on_disk:  # state on disk is that of the last checkpoint alone
            prune(self.folder, 1, None)
        else:
            prune(self.folder, self.keep, self.best[1] if self.best and self.keep_best else None)
        prune_best(self.folder)
        self.tell(Saved(step, checkpoint.path.name, pause, size, best=self.best is not None and self.best[1] == step))

    def save_best(self, take: Callable[[], Snapshot]) -> None:
        """Copy the weights that were best in validation now, finish them in the background. A failure costs a warning."""
        self.wait()
        begun, snapshot = self.clock(), None
        try:
            snapshot = take()
            path = draft(self.folder, snapshot.step, snapshot.weights, snapshot.state, snapshot.aliases, BEST)
        except (OSError, Mistake) as error:
            if snapshot is not None:
                gather_only(snapshot)
            self.best_failed(error)
            return
        self.pending = self.thread.submit(self.finish_best, path, snapshot.step, self.clock() - begun)

    def finish_best(self, path: Path, step: int, pause: float) -> None:
        try:
            checkpoint, size = publish(path)
        except OSError as error:
            self.best_failed(error)
            return
        self.tell(Saved(step, checkpoint.path.name, pause, size, best=True))

    def best_failed(self, error: OSError | Mistake) -> None:
        trouble, cure = trouble_with(error, self.folder)
        self.tell(
            Warned(
                f"the weights that were best in validation could not be saved ({trouble}): training goes on, and those that were "
                f"best before stay; {cure}, and the next ones will be saved"
            )
        )

    def failed(self, error: OSError | Mistake) -> None:
        self.trouble, self.cure = trouble_with(error, self.folder)
        others = "the checkpoints before it stay"
        if (
            isinstance(error, OSError) and error.errno in FULL
        ):  # make room for the next one: it is worth more than the oldest
            gone = make_room(self.folder, self.best and self.best[1])
            if gone is not None:
                others = f"that of step {gone.step} was removed to make room for the next"
                self.keep_best = self.keep_best and gone.step != (self.best and self.best[1])
                self.keep = max(self.keep - 1, 1)
        then = "and resume" if isinstance(error, Mistake) else "and the next one will be saved"
        self.tell(
            Warned(f"a checkpoint could not be saved ({self.trouble}): training goes on, {others}; {self.cure} {then}")
        )

    def wait(self) -> None:
        if self.pending is not None:
            self.pending.result()
            self.pending = None

    def close(self) -> None:
        self.wait()
        self.thread.shutdown()
