"""Run a script's training by several workers: the group of `shoestring train --devices`, started and awaited by the
script's process.

Workers run ahead of the caller's requests for steps. A caller that stops requesting ends the group, and a run with a
folder resumes from its last checkpoint.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.processes.group.launch import run_group
from shoestring.processes.nodes import Team
from shoestring.runs.events.event import Event, Stepped, Stopped, Validated
from shoestring.runs.events.event_log import note
from shoestring.runs.options import RunOptions
from shoestring.runs.reports.export import checkpoint_of, model_of, named_weights
from shoestring.runs.reports.report import Report, report_of
from shoestring.training.evidence.tasks import Position, specs_of
from shoestring.training.execution.batch_sizes import expected_batches
from shoestring.training.execution.job_planning import workers
from shoestring.training.execution.scripts.script_run import ScriptRun, silent
from shoestring.training.execution.tasks import TrainTask
from shoestring.training.execution.verification import worker_environment
from shoestring.training.planning.named_plan import check_named
from shoestring.training.planning.plan import TrainingOutcome, TrainingPlan

Told = tuple[int, float, Any]  # number, loss and metrics of a step


class NobodyAsks(Exception):
    """The caller requests no more steps."""


class ScriptRunByGroup(ScriptRun):
    """Training by several workers; `sent` is the job in a form that they can make again."""

    def __init__(
        self, job: Job, sent: Job, outcome: TrainingOutcome, model: nn.Module | None, asked: RunOptions, devices: int
    ) -> None:
        self.sent, self.devices, self.own = sent, devices, model
        super().__init__(job, outcome, model_of(job.model) if model is None else model, asked)

    def check_kept(self, plan: TrainingPlan) -> None:
        check_named(self.sent, plan.techniques, self.own, workers(self.devices), devices=self.devices)

    def run(self, on_event: Callable[[Event], None] = silent) -> Report:
        """Train to the end; then the weights are in the model."""
        folder = self.session.folder
        assert self.sent.origin is not None, "workers make it from a file"
        task = TrainTask(
            file=self.sent.origin.file,
            flags=dict(self.sent.origin.flags),
            techniques=specs_of(self.plan.techniques),
            steps=None,
            recording=self.recording(),
            expected=expected_batches(self.plan),
            position=Position(speeds=self.plan.details.speeds),
        )
        with self.session, self.session.noting_failure():
            try:
                result = run_group(
                    task,
                    worker_environment(self.plan.techniques),
                    Team(self.devices),
                    on_event,
                    self.session.held.lock.file,
                )
            except NobodyAsks:
                note(folder.path, Stopped(text="the script did not ask for more; what was not saved is done again"))
                raise
            self.session.end(self, self.plan, result)
            if result.stopped is not None:
                raise KeyboardInterrupt
            if result.unsaved:
                raise Mistake(result.unsaved)
            self.bring_home()
            return report_of(folder.path)

    def bring_home(self) -> None:
        """Copy the trained weights into the caller's model, if there is one."""
        own = self.own.state_dict() if self.own is not None else {}
        if not own:
            return
        found = named_weights(checkpoint_of(self.session.folder, None), trained=True)
        with torch.no_grad():
            for name, tensor in own.items():
                if name in found:
                    tensor.copy_(torch.cat([piece.reshape(-1) for piece in found[name].pieces()]).view(tensor.shape))

    def steps(self) -> Iterator[Told]:
        """Number, loss and metrics of every step, as its event arrives; the group runs in a thread of this process."""
        told: queue.Queue[Told | None] = queue.Queue()
        left = threading.Event()
        ended: list[BaseException] = []
        follow = StepsFromEvents(told.put)

        def on_event(event: Event) -> None:
            if left.is_set():
                raise NobodyAsks
            follow(event)

        def work() -> None:
            try:
                self.run(on_event)
                follow.flush()
            except BaseException as error:
                ended.append(error)
            finally:
                told.put(None)

        thread = threading.Thread(target=work, name="shoestring group")
        thread.start()
        try:
            while (step := told.get()) is not None:
                yield step
        finally:
            left.set()
            thread.join()
        if ended:
            raise ended[0]


def group_of(
    job: Job, sent: Job, outcome: TrainingOutcome, model: nn.Module | None, asked: RunOptions, devices: int
) -> ScriptRunByGroup:
    """The run of a plan for several workers; `model`: receives the trained weights at the end."""
    plan, world = outcome.chosen, outcome.chosen.details.world
    if world != devices:
        raise Mistake(
            f"{plan} is a plan for {world} worker{'s' * (world != 1)}, and --devices {devices} are to train: plan for "
            f"as many"
        )
    return ScriptRunByGroup(job, sent, outcome, model, asked, devices)


class StepsFromEvents:
    """Steps from events: each is yielded when the next one begins, because its validation comes after it. Steps that
    are repeated after a worker died are yielded once."""

    def __init__(self, tell: Callable[[Told], None]) -> None:
        self.tell, self.last = tell, 0
        self.waiting: Told | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, Stepped):
            self.flush()
            if event.step > self.last:
                self.waiting, self.last = (event.step, event.loss, {}), event.step
        elif isinstance(event, Validated) and self.waiting is not None:
            self.waiting = (*self.waiting[:2], dict(event.metrics))

    def flush(self) -> None:
        if self.waiting is not None:
            self.tell(self.waiting)
            self.waiting = None
