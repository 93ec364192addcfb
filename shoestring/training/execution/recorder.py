"""The recorder of a training run: writes events, saves checkpoints, handles stop requests, and watches memory."""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from shoestring.core.running.run import Run
from shoestring.core.running.run_state import LivesOnDisk
from shoestring.core.running.run_weights import traffic
from shoestring.core.running.signals import listen, stop_reason
from shoestring.core.units import bytes_text
from shoestring.core.workers.link import Link, agreement, agreement_bytes
from shoestring.data.feed import Feed
from shoestring.runs.checkpoints.cadence import Cadence
from shoestring.runs.checkpoints.checkpoints import (
    RunCheckpoint,
    best_in,
    clear_drafts,
    forget_best,
    move_aside,
    newest_good,
    reading_untrusted,
    whole_number,
)
from shoestring.runs.checkpoints.saver import Saver, Snapshot, gather_only
from shoestring.runs.events.event import Begun, Event, Failed, Finished, Stepped, Stopped, Validated, Warned
from shoestring.runs.events.event_log import Events
from shoestring.runs.folder import Folder
from shoestring.runs.modules import note_modules
from shoestring.training.execution.snapshot import PARTS, best_snapshot, restore, snapshot_of
from shoestring.training.progress import DATA_ENDED, Progress
from shoestring.training.validation import NoGoal

NEAR = 0.97  # fraction of the budget: a process this large causes a warning


@dataclass(frozen=True)
class RecordingSettings:
    """Where a run is recorded, and how often it is saved."""

    folder: str
    cadence: Cadence = field(default_factory=Cadence)
    memory: int | None = None  # bytes of the budget: the user is warned when the process comes near it
    predicted: int = 0  # bytes of the process according to the plan
    job_folder: str = (
        ""  # the folder of the job file; empty: a script made the job, and changed modules only cause a warning
    )


class Recorder:
    """Records one run of `steps` steps (0: unknown). `send` passes events to the launcher, while there is one."""

    def __init__(
        self, recording: RecordingSettings, steps: int, send: Callable[[Event], None], link: Link | None = None
    ) -> None:
        self.link = link = link or Link()
        self.folder = Folder(Path(recording.folder))
        self.steps, self.budget, self.predicted = steps, recording.memory, recording.predicted
        self.send = send
        self.events = Events(self.folder.path) if link.rank == 0 else None  # the first worker of a group writes for all
        self.saver = Saver(self.folder.checkpoints, recording.cadence, self.tell)
        self.checkpoint: RunCheckpoint | None = None  # the one that the run resumes from
        self.job_folder = recording.job_folder
        self.modules = 0  # number of modules that this process had imported at the last look
        self.step = 0
        self.stop = ""  # the reason to stop; empty: continue
        self.signal = 0  # the signal that asked to stop; 0: none
        self.warned = False
        listen(self.on_signal)

    def tell(self, event: Event) -> None:
        if self.events is None:
            return
        event = self.events.add(event)
        try:
            self.send(event)
        except OSError:
            self.stop = self.stop or "its launcher is gone"

    def on_signal(self, number: int, frame: Any) -> None:
        if self.stop:
            os._exit(128 + number)
        self.stop, self.signal = stop_reason(number), number

    def look(self) -> bool:
        """Find the newest good checkpoint; returns whether there is one. The first worker does it for all."""
        damaged: list[tuple[RunCheckpoint, str]] = []
        if self.link.rank == 0:
            clear_drafts(self.folder.checkpoints)
            self.checkpoint, damaged = newest_good(self.folder.checkpoints, PARTS)
        if self.link.world > 1:
            found = self.link.objects(self.checkpoint and str(self.checkpoint.path))[0]
            self.checkpoint = RunCheckpoint(Path(found)) if found else None
        for bad, reason in damaged:
            move_aside(bad)
            start = f"step {self.checkpoint.step}" if self.checkpoint else "the beginning"
            self.tell(
                Warned(
                    f"the checkpoint of step {bad.step} is damaged ({reason}): it is kept aside, "
                    f"and the run goes on from {start}"
                )
            )
        return self.checkpoint is not None

    def note_modules(self, begins: bool = False) -> None:
        """Record the run's local modules, if this process has imported more since the last time. The first worker does
        it for all."""

        def say(text: str) -> None:
            self.tell(Warned(text))
            if not self.job_folder:  # a script, whose user does not see the run's events
                warnings.warn(text, stacklevel=2)

        if self.events is not None and self.modules != len(sys.modules):
            self.modules = len(sys.modules)
            note_modules(self.folder, self.job_folder or os.curdir, bool(self.job_folder), say, begins)

    def resume(self, run: Run, feed: Feed) -> int:
        """Restore the checkpoint that was found; returns its step, 0 for a new run."""
        self.saver.on_disk = [part.note_saved for part in run.state_that(LivesOnDisk)]
        for text in filter(None, (part.remark for part in run.state.values())):
            self.tell(Warned(text))
        self.saver.by_loss = not feed.job.validates
        if self.checkpoint is not None:
            with reading_untrusted(self.checkpoint):
                state = restore(self.checkpoint, run, feed)
                self.step = self.saver.saved_step = whole_number(state["step"])
                self.saver.best = best_in(state) if self.saver.by_loss else None
        if self.link.rank == 0:
            forget_best(self.folder.checkpoints, self.step)
        self.tell(
            Begun(
                pid=os.getpid(),
                steps=self.steps,
                step=self.step,
                how=feed.how if self.step else "from the beginning",
                world=self.link.world,
                together=max(feed.loading_processes[0], 1),
            )
        )
        return self.step

    def after(self, run: Run, course: Progress, event: Stepped) -> bool:
        """A step is done; returns whether to continue."""
        self.step, feed = event.step, course.feed
        self.note_modules()
        synchronised = run.team.synchronised()
        validates = synchronised and course.due(self.step)
        stop, due = (
            synchronised and bool(self.stop) and run.team.assignment.counts_steps,
            synchronised and self.saver.due(self.step),
        )
        if synchronised and self.link.world > 1 and not run.team.assignment.asynchronous:
            stop, due, validates, event = self.agree(stop, due, validates, event)
        self.saver.losses.append(event.loss)
        self.tell(event)
        if self.budget and not self.warned and event.most > max(NEAR * self.budget, self.predicted):
            self.warned = True
            self.tell(
                Warned(
                    f"the process has {bytes_text(event.most)} of its {bytes_text(self.budget)} after step "
                    f"{self.step}, more than the {bytes_text(self.predicted)} that were predicted: "
                    f"it may run out of memory"
                )
            )
        if validates and (
            not stop or course.ends(self.step)
        ):  # a run that stops at such a step validates when it is resumed
            self.validate(run, course)
        last = stop or bool(course.over(self.step))
        if (due or last) and not (
            last and run.team.assignment.asynchronous
        ):  # asynchronous workers save at the end, when nobody computes any more
            self.save(run, feed)
        return not stop

    def validate(self, run: Run, course: Progress) -> None:
        """Validate, and save the weights if they are the best so far."""
        if not run.team.assignment.counts_steps:
            return
        try:
            found = course.validate(self.step)
        except NoGoal:  # all workers raise this; what was trained is not lost
            self.save(run, course.feed)
            self.saver.wait()
            raise
        metrics = {name: value if math.isfinite(value) else None for name, value in found.metrics.items()}
        self.tell(Validated(found.step, found.epoch, metrics, found.seconds, found.best))
        if found.best:

            def take() -> Snapshot:
                return best_snapshot(run, course.feed, self.step, found.metrics)

            if self.link.rank == 0:
                self.saver.save_best(take)
            elif not run.team.assignment.asynchronous:
                gather_only(take())

    def agree(self, stop: bool, due: bool, validates: bool, event: Stepped) -> tuple[bool, bool, bool, Stepped]:
        """Whether to stop (if any worker was asked to), to save and to validate (if the first worker wants to); and the
        step event with the largest process."""
        told = agreement(self.link.world)
        told[0], told[1] = stop, due + 2 * validates if self.link.rank == 0 else 0
        told[2 + 2 * self.link.rank :][:2] = torch.tensor([event.process, event.most])
        self.link.sum(told).wait()
        if told[0] and not self.stop:
            self.stop = "another worker of the group was asked to"
        wanted = int(told[1])
        return (
            bool(told[0]),
            bool(wanted & 1),
            bool(wanted & 2),
            replace(event, process=int(told[2::2].max()), most=int(told[3::2].max())),
        )

    def save(self, run: Run, feed: Feed) -> None:
        def take() -> Snapshot:
            return snapshot_of(run, feed, self.step, self.saver.best)

        if self.link.rank == 0:
            self.saver.save(take)
        elif not run.team.assignment.asynchronous:
            gather_only(take())
            self.saver.saved_step = self.step

    def end(self, run: Run, course: Progress) -> str:
        """The last step is done, the data ended, or a signal came: finish the checkpoint and report the end. Returns
        why the last weights of a finished run could not be saved; empty if they were."""
        feed, why = course.feed, course.over(self.step) or (DATA_ENDED if course.feed.ended else "")
        if why == DATA_ENDED:
            asked = f"{course.job.epochs} epochs" if course.job.epochs else f"{course.job.steps} steps"
            self.tell(
                Warned(
                    f"the data ended after step {self.step}, and {asked} were asked for: they are an iterator, or empty when gone "
                    f"through again. Give data that can be gone through again (a list, a DataLoader, a data set), or fewer steps"
                )
            )
        if why == DATA_ENDED and course.job.validates and course.validated_at != self.step:
            self.validate(run, course)
        self.saver.wait()
        if any(
            run.team.objects(self.saver.saved_step != self.step)
        ):  # the data ended early, or an earlier save was not possible
            self.save(run, feed)
        self.saver.close()
        lost: str = run.team.objects(self.unsaved_text() if self.saver.saved_step != self.step else "")[
            0
        ]  # as decided by the first worker
        if not why:
            saved = (
                ""
                if self.saver.saved_step == self.step
                else f"; the last checkpoint is of step {self.saver.saved_step}"
            )
            of = f" of {self.steps}" if self.steps else ""
            self.tell(Stopped(self.step, f"stopped after step {self.step}{of}, {self.stop}{saved}"))
            return ""
        if lost:
            self.tell(Failed(lost))
        else:
            self.tell(Finished(self.step, why, feed.epochs))
        return lost

    def close(self) -> None:
        """End threads and close files, however the run ended."""
        self.saver.close()
        if self.events is not None:
            self.events.close()
            self.events = None

    def unsaved_text(self) -> str:
        step = self.saver.saved_step
        there = f"the last checkpoint is of step {step}" if step else "there is no checkpoint"
        onward = "goes on from there, trains the missing steps again" if step else "trains again from the beginning"
        return (
            f"all {self.step} steps are done, but the weights after the last one could not be saved ({self.saver.trouble}), and "
            f"{there}: {self.saver.cure} and give the same command, which {onward} and saves"
        )


class Meter:
    """Bytes per step that a run moves to and from the disk and sends to other workers."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.steps = self.sent = 0  # totals so far
        self.begin()

    def begin(self) -> None:
        """A step begins; bytes since the last step belonged to a checkpoint."""
        self.before = traffic(self.run), self.run.team.mesh.bytes_sent

    def step(self) -> tuple[int | None, int | None]:
        """Bytes that the last step moved and sent, including the agreement after it; None without a disk, or without
        other workers."""
        moved, world = traffic(self.run), self.run.team.link.world
        agreed = (
            agreement_bytes(self.run.team.link)
            if self.run.team.synchronised() and not self.run.team.assignment.asynchronous
            else 0
        )
        sent = self.run.team.mesh.bytes_sent - self.before[1] + agreed
        self.steps, self.sent = self.steps + 1, self.sent + sent
        return moved - self.before[0] if moved else None, sent if world > 1 else None
