"""The course of a training beside its steps: its epochs, the schedule of its learning rate, validations, the best of them, and why it ends.

Whoever drives the loop (the worker, `shoestring.train`) asks it after every step. It survives a restart with the run.

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
from shoestring.core.run import Run, RunState
from shoestring.core.schedule import Schedule
from shoestring.data.feed import Feed
from shoestring.training.validation import SilentObserver, check_goal, validated

DATA_ENDED = "data ended"


@dataclass(frozen=True)
class Validation:
    """What was found in a validation."""

    step: int
    epoch: int  # rounds of the data that were over
    metrics: Mapping[str, float]
    seconds: float
    best: bool  # no validation before was as good


class Progress(RunState):
    of_technique = False

    def __init__(self, job: Job, run: Run, feed: Feed) -> None:
        self.job, self.run, self.feed = job, run, feed
        self.interval, self.target = interval(job.every), target(job.goal)
        self.validated_at = 0  # the step of the last validation; 0: there was none
        self.epochs_then = 0  # epochs that were over then
        self.best: tuple[float, int] | None = None  # the best value of the goal, and its step
        self.without_better = 0  # validations since then
        self.latest: Validation | None = None  # of this life
        self.clock = time.monotonic()  # when the last validation was, of this life
        self.watch = SilentObserver()  # who looks on at validations
        found = run.state.get("schedule")
        self.schedule = found if isinstance(found, Schedule) else None

    def batches(self) -> Iterator[Any]:
        """The batches to train on. When one comes, its step begins, at the rate that the schedule has for it."""
        return map(self.begin_step, self.feed)

    def begin_step(self, batch: Any) -> Any:
        if self.schedule is not None:
            self.schedule.begin_step(self.feed.epoch, self.run.assignment)
        return batch

    @property
    def rate(self) -> float | None:
        """The learning rate of the step that was begun last; None: there is no schedule."""
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
        """Whether to validate after this step. Where it can't be asked after every step (workers meet every few), the next time it is."""
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
        metrics = validated(self.run, self.job, self.watch)
        check_goal(self.job, metrics)
        value = metrics[self.target.metric]
        better = self.target.better(value, self.best[0] if self.best else None)
        if better:
            self.best = (value, step)
        self.without_better = 0 if better else self.without_better + 1
        if self.schedule is not None:
            self.schedule.validated(value)
        self.validated_at, self.epochs_then, self.clock = step, self.feed.epochs, time.monotonic()
        self.latest = Validation(step, self.feed.epochs, metrics, self.clock - begun, better)
        return self.latest

    def metrics(self, step: int) -> Mapping[str, float]:
        """What the validation after this step found, if there was one."""
        return self.latest.metrics if self.latest is not None and self.latest.step == step else {}

    def ends(self, step: int) -> str:
        """Why training ends after this step, whatever validation says; empty: it does not."""
        if self.job.epochs and self.feed.epochs >= self.job.epochs:
            return "epochs"
        return "steps" if self.job.steps and step >= self.job.steps else ""

    def over(self, step: int) -> str:
        """Why training ends after this step; empty: it goes on."""
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
