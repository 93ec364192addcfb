"""Training in a worker process: the steps of the loop, each reported as an event; with a run folder, recorded there and
resumed.

the first two steps tracked: their tensor memory is measured the first validation tracked too; in a trial, which is not
recorded, one on the largest held-out batch, at the end the other steps not tracked, unless a batch is larger than those
tracked so far
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice
from typing import Any

from torch import nn

from shoestring.core.batch import Batch
from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.core.running.run import Run
from shoestring.core.workers.link import GroupDone, Link
from shoestring.data.feed import NO_BATCH, Feed
from shoestring.data.lengths import batches_at, planned_batches, planned_for
from shoestring.measure.holdings import Holders
from shoestring.measure.load import LoadWatch
from shoestring.measure.process import status
from shoestring.measure.timeline import peak
from shoestring.measure.tracker import Tracker, watch_run
from shoestring.runs.events.event import Event, Measured, Stepped, Warned
from shoestring.runs.events.history import History, measured_by, measured_figures
from shoestring.training.evidence.held_out import Watching, looked_through
from shoestring.training.evidence.rehearse import tracked_steps
from shoestring.training.evidence.tasks import TrialResult, TrialTask, techniques_of
from shoestring.training.execution.batch_sizes import TRACKED, BatchSizes, ExpectedBatches
from shoestring.training.execution.begin import made_run
from shoestring.training.execution.job_of_task import job_of
from shoestring.training.execution.recorder import Meter, Recorder, RecordingSettings
from shoestring.training.execution.result import readable_state, trained_model
from shoestring.training.execution.step_timing import own_times, report_timeline, stage_times
from shoestring.training.execution.tasks import TrainResult, TrainTask
from shoestring.training.loop import finite, steps
from shoestring.training.progress import Progress
from shoestring.training.technique import TrainingTechnique
from shoestring.training.validation import SilentObserver, run_validation

Tell = Callable[[Event], None]  # passes an event to the launcher


def train(task: TrainTask, tell: Tell, link: Link | None = None) -> TrainResult:
    """Train, alone or as a worker of a group."""
    training = Training(job_of(task, link), techniques_of(task.techniques), task.recording, tell, task.expected)
    training.do_steps()
    return training.finish(task.weights)


def trial(task: TrialTask, tell: Tell, link: Link | None = None) -> TrialResult:
    """Run a few real steps to see how large this process grows."""
    expects = ExpectedBatches(tracked=task.tracked)
    training = Training(
        job_of(task, link if task.together else None), techniques_of(task.techniques), None, tell, expects
    )
    largest = largest_batches(training.job, task.largest, training.run)
    # Last: memory that the allocator keeps of smaller batches can't be used for it, while its own can be used for all
    # that follow
    training.batches = (
        chain(islice(training.batches, max((task.steps or 0) - len(largest), 0)), largest)
        if largest
        else training.batches
    )
    training.do_steps()
    training.validate_once()
    result = training.result()
    return TrialResult(result.measured["process_bytes"], result.measured["step_seconds"], result.steps)


def largest_batches(job: Job, numbers: tuple[int, ...], run: Run) -> list[Batch]:
    """The batches that the plan is for, unless they are the first ones; the first of them twice."""
    jobs = [planned_for(job, batch) for batch in batches_at(job, numbers)] or [job] * (job.largest is not None)
    return [
        batch
        for place, one in enumerate(jobs)
        for batch in islice(planned_batches(one, run.team.assignment), 1 if place else 2)
    ]


class Training:
    """The training of one process, of the job's model or the given one, and what it measured so far."""

    def __init__(
        self,
        job: Job,
        techniques: tuple[TrainingTechnique, ...],
        recording: RecordingSettings | None,
        tell: Tell,
        expects: ExpectedBatches | None = None,
        model: nn.Module | None = None,
    ) -> None:
        self.job, self.tell = job, tell
        self.link = self.job.link
        self.feed = Feed(self.job)
        self.feed.start()
        self.wanted = self.feed.steps_in_all  # 0: unknown
        self.recorder = Recorder(recording, self.wanted, tell, self.link) if recording else None
        expects = expects or ExpectedBatches()
        self.tracker = Tracker(forgiving=True)
        counted = replace(self.job, steps=self.wanted, epochs=0) if self.wanted else self.job
        run = made_run(counted, techniques, self.recorder, self.tracker if expects.tracked else None, model)
        self.feed.assignment = run.team.assignment
        self.course = Progress(self.job, run, self.feed)
        self.run = replace(run, state={**run.state, "course": self.course})
        if self.recorder:
            self.recorder.note_modules(begins=True)
        self.number = self.recorder.resume(self.run, self.feed) if self.recorder else 0  # the last step done
        self.losses: list[float] = []
        self.history = History()  # used without a folder
        self.meter = Meter(self.run)
        self.load = LoadWatch()
        self.batches: Iterator[Batch] = self.course.batches()
        self.sizes = BatchSizes(expects, recording.memory if recording else None, run.team.assignment.parts, self.warn)
        self.tensors: dict[str, Any] = {"peak_bytes": 0}  # their peak so far
        self.noted = self.told = 0  # tracked steps whose memory was read; bytes that were reported
        self.last: list[Any] = []  # the batch of the last step,
        self.loss: Any = None  # and its loss: both stay in memory during a validation
        self.holders = Holders(self.job, self.feed.references)
        if expects.tracked:
            self.course.watch = Watching(self.run, self.tracker, self.holders, lambda: (self.last, self.loss))
        self.untracked = ""  # why the tracker failed, once that was reported
        self.step_begun = time.perf_counter()

    def finish(self, file: str = "") -> TrainResult:
        """How training ended, with the results of the trained model; its weights are written to `file`, if given."""
        if self.recorder is None:
            self.validate_once()
        result = self.result()
        if result.stopped is not None or result.unsaved:
            return result
        digest, shown = trained_model(self.job, self.run, file, self.warn)
        return replace(result, weights_sha256=digest, shown=shown)

    def result(self) -> TrainResult:
        """The last step is done: how training ended."""
        self.feed.close()
        self.run.team.assignment.end()
        found = self.link.objects(
            {
                **self.tensors,
                "process_bytes": status("VmHWM"),
                "steps": self.meter.steps,
                "sent": self.meter.sent,
                "times": own_times(self.run),
            }
        )
        told, workers = (
            stage_times(self.run, self.number, found),
            [{key: one[key] for key in one if key != "times"} for one in found],
        )
        if self.recorder and told is not None:
            self.recorder.tell(told)
        if self.recorder and self.run.team.assignment.asynchronous and self.losses:
            self.recorder.tell(measured_by(workers))
        elif (
            self.recorder
            and self.losses
            and (most := max(workers, key=lambda one: int(one["peak_bytes"])))["peak_bytes"] > self.told
        ):
            self.recorder.tell(
                Measured(most["peak_bytes"], most["flops"], most["where"], most["parts"])
            )  # of a batch that came later
        if self.recorder:
            self.recorder.note_modules()
        unsaved = self.recorder.end(self.run, self.course) if self.recorder else ""
        if not self.course.over(self.number) and not self.feed.ended and self.run.team.assignment.counts_steps:
            return TrainResult(stopped=self.number)
        if unsaved:
            return TrainResult(unsaved=unsaved)
        states = readable_state(self.run)
        return TrainResult(
            self.number, tuple(self.losses), states, self.figures(workers), self.link.world, tuple(workers)
        )

    def do_steps(self) -> None:
        """Train until the end, or until asked to stop."""
        for _ in self.each():
            pass

    def each(self) -> Iterator[int]:
        """The same, yielding the number of each step when it is done."""
        if (
            self.number and self.recorder and self.course.due(self.number) and self.run.team.synchronised()
        ):  # it was stopped before that
            self.recorder.validate(self.run, self.course)
        if (
            self.number and self.run.team.assignment.counts_steps and self.course.over(self.number)
        ):  # it was over, only its end was missing
            return
        with suppress(GroupDone):  # the first worker has counted them
            for loss in self.tracked_losses():
                go_on = self.note_step(loss)
                yield self.number
                if not go_on:
                    break
        if self.losses:
            self.note_tensors()
        elif not self.number and self.run.team.assignment.counts_steps:
            raise Mistake(NO_BATCH)

    def tracked_losses(self) -> Iterator[Any]:
        """The losses of all steps. Steps are tracked if `sizes` asks for their memory."""
        loss: Any = None
        for batch in self.batches:
            self.last[:] = [batch]
            if self.sizes.count >= TRACKED:  # and later whenever there is something new to report
                self.note_tensors()
            if self.sizes.tracks(batch, self.number + 1) and not self.tracker.failed:
                watch = watch_run(
                    self.run, self.tracker, self.holders
                )  # what was made while it was off is in memory too,
                if loss is not None:
                    self.tracker.look(self.tracker.hold, (loss,))  # and so is the last loss
                for loss in tracked_steps(watch, (batch,), self.tracker):
                    yield loss
            else:
                for loss in steps(self.run, (batch,)):
                    yield loss

    def warn(self, text: str) -> None:
        """Warn the user before the next step."""
        self.recorder.tell(Warned(text)) if self.recorder else self.tell(Warned(text, time=time.time()))

    def note_step(self, loss: Any) -> bool:
        """Report a finished step; returns whether another one follows."""
        self.number += 1
        imagined = (
            self.link.world > 1 and self.link.imagined
        )  # an imagined group's messages are missing: bytes count, numbers do not
        self.loss = loss
        self.losses.append(float(loss) if imagined else finite(float(loss), self.number))
        seconds = time.perf_counter() - self.step_begun
        moved, sent = self.meter.step()
        step = Stepped(
            self.number,
            self.losses[-1],
            seconds,
            status("VmRSS"),
            status("VmHWM"),
            moved,
            sent,
            self.feed.epochs,
            self.course.rate,
            self.run.noted.take_norm(),
            # workers of a group slow each other down, as planned, and that is no disturbance
            self.load.held_up(self.step_begun + seconds) if self.link.world == 1 else None,
        )
        go_on = self.recorder.after(self.run, self.course, step) if self.recorder else True
        if self.course.validated_at == self.number and self.noted:
            self.note_validation()
        if (
            self.recorder
            and (told := report_timeline(self.run, self.meter.steps, self.tensors["peak_bytes"])) is not None
        ):
            self.recorder.tell(replace(told, step=self.number))
        self.meter.begin()
        if self.recorder is None:
            step = replace(step, time=time.time())
            self.history.add(step)
            self.tell(step)
        self.step_begun = time.perf_counter()
        return go_on and not (self.run.team.assignment.counts_steps and self.course.over(self.number))

    def note_validation(self) -> None:
        """The first validation after the first steps is done: include its tensor memory."""
        if type(self.course.watch) is Watching:
            self.course.watch = SilentObserver()
            self.note_tensors(validated=True)

    def validate_once(self) -> None:
        """Validate on the largest held-out batch alone, to measure its memory; the metrics are ignored."""
        if not self.job.validates or not self.losses or not self.run.team.assignment.counts_steps:
            return
        if self.job.validate is not None:
            run_validation(self.run, self.job, self.course.watch)
        else:
            found = looked_through(self.job, self.run.team.assignment.asynchronous)
            run_validation(self.run, self.job, self.course.watch, [(found.largest, True)])
        self.note_tensors(validated=True)

    def note_tensors(self, validated: bool = False) -> None:
        """Report this worker's tensor memory in tracked steps, if there are new ones, or in a validation. Synchronous
        workers report their first steps and joint work together, and later steps, whose batches differ between workers,
        at the end."""
        if not self.sizes.count or (self.noted == self.sizes.count and not validated):
            return
        together, self.noted = validated or not self.noted, self.sizes.count
        self.tracker.look(self.note_need)
        if self.tracker.failed:
            self.tensors = {"peak_bytes": 0}  # what was seen before is incomplete
            self.tell_untracked()
        if self.run.team.assignment.asynchronous or not (
            together or self.link.world == 1
        ):  # asynchronous workers report theirs at the end
            return
        own = self.tensors["peak_bytes"]
        self.told = max(self.run.team.objects(own)) if together else own
        if self.recorder and own:
            self.recorder.tell(Measured(self.told, self.tensors["flops"], self.tensors["where"], self.tensors["parts"]))

    def note_need(self) -> None:
        """Read the tensor memory from the tracker's log."""
        log, highest = self.tracker.log, peak(self.tracker.log)
        self.tensors = {
            "peak_bytes": highest.bytes,
            "flops": sum(log.flops.values()) / self.sizes.count,
            "where": str(highest.moment),
            "parts": dict(highest.parts),
        }

    def tell_untracked(self) -> None:
        """Report once that the tracker failed. It only observes, so weights do not depend on it."""
        if not self.untracked:
            self.untracked = self.tracker.failed
            self.warn(
                f"shoestring could not track the memory of this training ({self.untracked}), so what its tensors need is not "
                f"measured; training goes on, and its weights are those that it would have had"
            )

    def figures(self, workers: list[Any]) -> dict[str, Any]:
        """The measured figures: of the whole run if a folder has its events, else of these steps."""
        if self.recorder:
            return measured_figures(History().read(self.recorder.folder.path))
        self.history.add(measured_by(workers))
        found = measured_figures(self.history)
        return (
            found if found.get("peak_bytes") else {name: value for name, value in found.items() if name != "peak_bytes"}
        )
