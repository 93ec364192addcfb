"""Progress of a training beyond its steps: epochs, the learning-rate schedule, validations and the best of them, and
when it ends.

The loop's driver (the worker, `shoestring.train`) asks it after every step. Its state is saved with the run.

Contract: Whoever drives the loop takes its batches from `batches()`: when a batch comes, the schedule is brought to the
step that begins (tests/training/test_progress.py). Techniques may hold an optimizer's groups, so they stay the same
objects, also when a checkpoint is loaded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shoestring.core.job import Job, interval, target
from shoestring.core.optimization.schedule import Schedule
from shoestring.core.running.run import Run
from shoestring.core.running.run_state import RunState
from shoestring.data.feed import Feed
from shoestring.training.validation import SilentObserver, check_goal, run_validation

DATA_ENDED = "data ended"


@dataclass(frozen=True)
class Validation:
    """The result of a validation."""

    step: int
    epoch: int  # epochs that were over
    metrics: Mapping[str, float]
    seconds: float
    best: bool  # whether it is the best so far


class Progress(RunState):
    of_technique = False

    def __init__(self, job: Job, run: Run, feed: Feed) -> None:
        self.job, self.run, self.feed = job, run, feed
        self.interval, self.target = interval(job.every), target(job.goal)
        self.validated_at = 0  # step of the last validation; 0: there was none
        self.epochs_then = 0  # epochs that were over at the last validation
        self.best: tuple[float, int] | None = None  # the best value of the goal, and its step
        self.without_better = 0  # validations since the best one
        self.latest: Validation | None = None  # since this process started
        self.clock = time.monotonic()  # time of the last validation, or of the start of this process
        self.watch = SilentObserver()  # observes validations
        found = run.state.get("schedule")
        self.schedule = found if isinstance(found, Schedule) else None

    def batches(self) -> Iterator[Any]:
        """The batches to train on. Taking one begins its step, at the rate that the schedule has for it."""
        return map(self.begin_step, self.feed)

    def begin_step(self, batch: Any) -> Any:
        if self.schedule is not None:
            self.schedule.begin_step(self.feed.epoch, self.run.team.assignment)
        return batch

    @property
    def rate(self) -> float | None:
        """The learning rate of the present step; None without a schedule."""
        return None if self.schedule is None else self.schedule.rate

    @property
    def remark(self) -> str:
        if not self.job.validates or self.interval.unit != "seconds":
            return ""
        return (
            f"validation is due by the clock (every={self.job.every!r}), so the steps that are validated, the best of them and an end "
            f'by patience differ from run to run: give steps (every=100) or epochs (every="1 epoch") for the same every time'
        )

    def due(self, step: int) -> bool:
        """Whether to validate after this step. If not every step can ask (workers meet every few steps), the next one
        that can does it."""
        if not self.job.validates or step == self.validated_at or not step:
            return False
        if self.ends(step):
            return True
        number, unit = self.interval
        if unit == "seconds":
            return time.monotonic() - self.clock >= number
        now, before = (self.feed.epochs, self.epochs_then) if unit == "epochs" else (step, self.validated_at)
        return now // int(number) > before // int(number)

    def validate(self, step: int) -> Validation:
        """Validate now."""
        begun = time.monotonic()
        metrics = run_validation(self.run, self.job, self.watch)
        check_goal(self.job, metrics)
        value = metrics[self.target.metric]
        better = self.target.better(value, self.best[0] if self.best else None)
        if better:
            self.best = (value, step)
        self.without_better = 0 if better else self.without_better + 1
        if self.schedule is not None:
            self.schedule.note_validation(value)
        self.validated_at, self.epochs_then, self.clock = step, self.feed.epochs, time.monotonic()
        self.latest = Validation(step, self.feed.epochs, metrics, self.clock - begun, better)
        return self.latest

    def metrics(self, step: int) -> Mapping[str, float]:
        """The metrics of the validation after this step, if there was one."""
        return self.latest.metrics if self.latest is not None and self.latest.step == step else {}

    def ends(self, step: int) -> str:
        """Why training ends after this step, apart from validations; empty if it goes on."""
        if self.job.epochs and self.feed.epochs >= self.job.epochs:
            return "epochs"
        return "steps" if self.job.steps and step >= self.job.steps else ""

    def over(self, step: int) -> str:
        """Why training ends after this step; empty if it goes on."""
        if self.job.patience and self.without_better >= self.job.patience:
            return f"no better for {self.job.patience} validations"
        return self.ends(step)

    def state_dict(self) -> dict[str, Any]:
        return {
            "validated_at": self.validated_at,
            "epochs_then": self.epochs_then,
            "best": self.best,
            "without_better": self.without_better,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.validated_at, self.epochs_then, self.without_better = (
            state["validated_at"],
            state["epochs_then"],
            state["without_better"],
        )
        self.best = None if state["best"] is None else (float(state["best"][0]), int(state["best"][1]))
