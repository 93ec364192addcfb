"""Decides when to save, and saves while training continues.

Training pauses only while tensors are copied to the file; hashing and syncing happen in a thread. A save that fails
(full disk, unsavable state) only causes a warning, and the next one is tried on schedule. On a full disk older
checkpoints are deleted to make room, except the newest good one.

If the job validates, weights that are the best so far are saved at once, before training continues. They are deleted
when newer ones exist and no checkpoint refers to them any more; so whatever checkpoint a killed run is resumed from,
its best weights exist.

Contract: The best weights are deleted only if no existing checkpoint refers to them, or on resume if they were found
after the checkpoint that the run resumes from (tests/runs/test_best.py).
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
from shoestring.core.files.regular import not_a_folder
from shoestring.core.running.run_state import StoredTensor
from shoestring.runs.checkpoints.cadence import Cadence
from shoestring.runs.checkpoints.checkpoints import BEST, draft, make_room, prune, prune_best, publish
from shoestring.runs.checkpoints.packing import pack
from shoestring.runs.events.event import Event, Saved, Warned

FULL = (errno.ENOSPC, errno.EDQUOT)
SHARE = 0.03  # largest fraction of the time for saving, unless the user asked for a number of steps


@dataclass(frozen=True)
class Snapshot:
    """The content of a checkpoint."""

    step: int
    weights: Mapping[str, Tensor | StoredTensor]
    aliases: Mapping[str, str]  # second names of tied weights
    state: Mapping[str, Any]


def gather_only(snapshot: Snapshot) -> None:
    """Take part in gathering what workers hold parts of, in the order in which the first worker, the only one that
    writes, asks for it."""
    tensors: dict[str, Tensor | StoredTensor] = {}
    try:
        pack(snapshot.state, tensors, "state")
    except Mistake:  # it can't be written, so nobody gathers it
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
        self.pause = 0.0  # seconds that training was paused for the last save
        self.saved_step = 0
        self.turn = 0  # how often it was due, if saved every so many steps
        self.losses: list[float] = []  # since the last save
        self.on_disk: list[Callable[[], None]] = []  # called once a checkpoint is safe, before the next step
        self.by_loss = True  # the best checkpoint follows from the training loss; False: from validation
        self.best: tuple[float, int] | None = None
        self.keep = cadence.keep  # number of checkpoints to keep; reduced when the disk was full,
        self.keep_best = True  # and finally not even the best one
        self.trouble = self.cure = ""  # why the last save failed, and what to do

    def due(self, step: int) -> bool:
        """Whether to save after this step. If it can't be asked after every step (workers synchronise every few), it is
        due at the next opportunity."""
        if self.cadence.steps:
            before, self.turn = max(self.turn, self.saved_step // self.cadence.steps), step // self.cadence.steps
            return self.turn > before
        if self.pending is not None and not self.pending.done():
            return False
        return self.clock() - self.last >= max(self.cadence.seconds, self.pause / SHARE)

    def save(self, take: Callable[[], Snapshot]) -> None:
        """Copy the state now and finish the checkpoint in the background."""
        self.wait()
        begun = self.clock()
        snapshot = None
        try:
            snapshot = take()
            path = draft(self.folder, snapshot.step, snapshot.weights, snapshot.state, snapshot.aliases)
        except (OSError, Mistake) as error:
            if snapshot is not None:
                gather_only(snapshot)
            self.note_failure(error)
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
            self.note_failure(error)
            return
        self.saved_step = step
        if self.by_loss and (self.best is None or loss < self.best[0]):
            self.best = (loss, step)
        if self.on_disk:  # state on disk only matches the last checkpoint
            prune(self.folder, 1, None)
        else:
            prune(self.folder, self.keep, self.best[1] if self.best and self.keep_best else None)
        prune_best(self.folder)
        self.tell(Saved(step, checkpoint.path.name, pause, size, best=self.best is not None and self.best[1] == step))

    def save_best(self, take: Callable[[], Snapshot]) -> None:
        """Copy the weights that are best in validation now and finish in the background. A failure only causes a
        warning."""
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

    def note_failure(self, error: OSError | Mistake) -> None:
        self.trouble, self.cure = trouble_with(error, self.folder)
        others = "the checkpoints before it stay"
        if (
            isinstance(error, OSError) and error.errno in FULL
        ):  # make room for the next one, which is worth more than the oldest
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
