"""The history of a run: its events folded into columns and measured figures, incrementally as they are read.

A page of a long run can be redrawn without reading all events again. Only the numbers of a step are kept, in columns: a
million steps take 80 MB; as dicts they would take more than a GB.

    process_bytes    the largest process of any worker in any step
    step_seconds     the median step; the first two of every life are left out if there are others, because they warm up. If several
                     processes load batches, of groups of as many steps (`usual_step`)
    traffic_bytes    to and from the disk: the median of the same steps (a run's first step has no moments to read)
    sent_bytes       to other workers: the mean of all steps, because workers that synchronise every few steps send nothing in between
    sent_by_others_bytes    in asynchronous groups: the same for the other workers, per step of their own
    validation_seconds      the median validation
    peak_bytes, ...  of the life with the highest tensor peak, from its `Measured` event

A life lasts from one `Begun` event to the next. A step that was done again after a resume counts once, and only steps
since the last change of plan count.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite, nan
from pathlib import Path
from statistics import mean, median
from typing import Any, TypeVar

from shoestring.planning.quantities import HELD_UP_SHARE
from shoestring.runs.events.event import (
    Adopted,
    Begun,
    Event,
    Failed,
    Finished,
    Measured,
    Planning,
    RoomEvent,
    Saved,
    StageTimes,
    Stepped,
    Stopped,
    Validated,
)
from shoestring.runs.events.event_log import PIECE, StepRecord, read_records, record_of
from shoestring.runs.events.time_left import usual_step

E = TypeVar("E", bound=RoomEvent)
BEST = "best"  # prefix of the names of checkpoints that hold only the best weights
DOING = (Planning, Begun, Stopped, Finished, Failed)  # events that say what the run is doing
MISSING = -1  # stands for bytes that a step does not record
YOUNG = 2  # first steps of a life, which are slower than the rest


class Steps:
    """The steps that count, in order. A step that is done again after a resume replaces the lost one."""

    def __init__(self) -> None:
        self.number, self.process, self.most, self.moved, self.sent, self.epoch = (array("q") for _ in range(6))
        self.time, self.loss, self.seconds, self.rate, self.norm, self.held_up = (
            array("d") for _ in range(6)
        )  # NaN where it is not recorded
        self.age = array("q")  # number of the step in its life, from 1
        self.plan = array("q")  # number of plan changes before it

    @property
    def columns(self) -> tuple[Any, ...]:
        return (
            self.number,
            self.process,
            self.most,
            self.moved,
            self.sent,
            self.epoch,
            self.time,
            self.loss,
            self.seconds,
            self.rate,
            self.norm,
            self.held_up,
            self.age,
            self.plan,
        )

    def __len__(self) -> int:
        return len(self.number)

    def add(self, step: StepRecord, age: int, plan: int) -> None:
        number = step["step"]
        if self.number and number <= self.number[-1]:  # done again, and the event of the resume is lost
            place = bisect_left(self.number, number)
            end, again = place + (self.number[place] == number), Steps()
            again.add(step, age, plan)
            for column, value in zip(self.columns, again.columns, strict=True):
                column[place:end] = value
            return
        self.number.append(number)
        self.process.append(step["process"])
        self.most.append(step["most"])
        self.moved.append(step.get("moved", MISSING))
        self.sent.append(step.get("sent", MISSING))
        self.epoch.append(step.get("epoch", 0))
        self.rate.append(step.get("rate", nan))
        self.norm.append(step.get("norm", nan))
        self.held_up.append(step.get("held_up", nan))
        self.time.append(step["time"])
        self.loss.append(step["loss"])
        self.seconds.append(step["seconds"])
        self.age.append(age)
        self.plan.append(plan)

    def back_to(self, step: int) -> None:
        """Forget all steps after this one."""
        place = bisect_right(self.number, step)
        for column in self.columns:
            del column[place:]


class History:
    """A run's history so far; `read` continues where it ended."""

    def __init__(self) -> None:
        self.offset = 0  # position in the file
        self.damaged = self.rest = 0  # skipped lines; bytes after the last complete line
        self.wrong = ""  # why reading can't continue
        self.steps = Steps()
        self.others: list[Event] = []  # all but steps and measurements
        self.saved: list[Saved] = []
        self.validated: list[Validated] = []  # of the steps that count
        self.told: dict[type[RoomEvent], list[RoomEvent]] = {}  # by rooms, about the steps that count
        self.measured: list[tuple[int, Measured]] = []  # with the number of plan changes before it
        self.timed: StageTimes | None = None  # the last timeline
        self.doing: Event = Planning()  # the last event that says what the run is doing
        self.wanted = 0  # total number of steps planned
        self.together = 1  # batches that come at once
        self.begun: float | None = None  # time of the first event, and of the last
        self.last: float | None = None
        self.age = self.plan = 0  # steps in this life; plan changes so far

    def read(self, folder: Path) -> History:
        """Read the new events in the file."""
        while True:
            found = read_records(folder, self.offset, PIECE)
            for event in found.events:
                self.add(event)
            self.damaged += found.damaged
            before, self.offset, self.rest, self.wrong = self.offset, found.offset, found.rest, found.wrong
            if self.offset == before:
                return self

    def add(self, event: Event | StepRecord) -> None:
        if isinstance(event, dict):  # tested first, because nearly all events are steps
            self.add_step(event)
        elif isinstance(event, Stepped):
            self.add_step(record_of(event))
        else:
            self.add_other(event)

    def add_step(self, step: StepRecord) -> None:
        self.last = step["time"]
        if self.begun is None:
            self.begun = self.last
        self.age += 1
        self.steps.add(step, self.age, self.plan)

    def add_other(self, event: Event) -> None:
        self.last = event.time
        if self.begun is None:
            self.begun = self.last
        if isinstance(event, Measured):
            self.measured.append((self.plan, event))
            return
        if isinstance(event, StageTimes):
            self.timed = event
            return
        if isinstance(event, RoomEvent):
            same = self.told.setdefault(type(event), [])
            while same and same[-1].step >= event.step:  # done again, and the event of the resume is lost
                same.pop()
            same.append(event)
            return
        self.others.append(event)
        if isinstance(event, DOING):
            self.doing = event
        if isinstance(event, Begun):
            self.wanted, self.together, self.age = event.steps, event.together, 0
            self.steps.back_to(event.step)
            self.validated = [one for one in self.validated if one.step <= event.step]
            for kind, told in self.told.items():
                self.told[kind] = [one for one in told if one.step <= event.step]
        elif isinstance(event, Adopted):
            self.plan, self.age, self.timed = self.plan + 1, 0, None
        elif isinstance(event, Saved):
            if not event.checkpoint.startswith(f"{BEST}-"):  # a run can't be resumed from those
                self.saved.append(event)
        elif isinstance(event, Validated):
            self.validated = [one for one in self.validated if one.step < event.step] + [event]

    def of_kind(self, kind: type[E]) -> list[E]:
        """A room's events of one kind about the steps that count."""
        return [one for one in self.told.get(kind, ()) if isinstance(one, kind)]


def metrics_of(validated: Iterable[Validated]) -> list[dict[str, Any]]:
    """Validations as JSON: [{"step": 100, "epoch": 1, "loss": 0.3, "accuracy": 0.9}]."""
    return [{"step": one.step, "epoch": one.epoch, **one.metrics} for one in validated]


def best_of(validated: Iterable[Validated]) -> Validated | None:
    """The validation that was the best by the job's goal when it was made."""
    return max((one for one in validated if one.best), key=lambda one: one.step, default=None)


def measured_figures(history: History) -> dict[str, float]:
    """The measured figures of the steps that count, by name; empty if there are none."""
    steps = history.steps
    if not steps:
        return {}
    lives = lives_of(history)
    since = newest_plan(history)
    ours = [place for place, plan in enumerate(steps.plan) if plan >= since] if since else range(len(steps))
    calm = steady_steps(history, ours)
    figures: dict[str, float] = {}
    if (largest := largest_life(history)) is not None:
        figures |= {"peak_bytes": largest.peak_bytes, "flops": largest.flops}
        if largest.sent_by_others_bytes is not None:
            figures["sent_by_others_bytes"] = largest.sent_by_others_bytes
    figures["process_bytes"] = max(
        *(steps.most[place] for place in ours), *(event.process_bytes or 0 for event in lives), 0
    )
    figures["step_seconds"] = usual_step([steps.seconds[place] for place in calm], history.together)
    if looks := [share for place in ours if isfinite(share := steps.held_up[place])]:
        figures[HELD_UP_SHARE] = mean(looks)
    if steps.moved[-1] != MISSING:
        figures["traffic_bytes"] = median(max(steps.moved[place], 0) for place in calm)
    if history.validated:
        figures["validation_seconds"] = median(one.seconds for one in history.validated)
    for kind, told in history.told.items():
        if told:
            figures |= kind.measured_figures(told, steps.seconds, figures["step_seconds"])
    if steps.sent[-1] != MISSING:
        figures["sent_bytes"] = mean(max(steps.sent[place], 0) for place in ours)
    return {name: value for name, value in figures.items() if isfinite(value)}  # an event may lack its seconds


def largest_life(history: History) -> Measured | None:
    """The measurement of the life with the highest tensor peak."""
    return max(lives_of(history), key=lambda event: event.peak_bytes, default=None)


def lives_of(history: History) -> list[Measured]:
    return [event for plan, event in history.measured if plan >= newest_plan(history)]


def newest_plan(history: History) -> int:
    """Number of plan changes that separate the present plan's steps from earlier ones; 0 until the newest plan has a
    step."""
    steps = history.steps
    return history.plan if steps and steps.plan[-1] == history.plan else 0


def steady_steps(history: History, ours: Sequence[int]) -> list[int]:
    """The steps without the first ones of every life, if there are others."""
    found = ([place for place in ours if history.steps.age[place] > young] for young in range(YOUNG, -1, -1))
    return next(filter(None, found))


def measured_by(workers: Sequence[Mapping[str, Any]]) -> Measured:
    """What asynchronous workers measured, combined from each worker's own life: the largest value counts.

    Each worker reports peak_bytes with where, parts and flops, process_bytes, its number of steps, and the bytes it
    sent in them.
    """
    largest = max(workers, key=lambda one: int(one["peak_bytes"]))
    others = [one for one in workers[1:] if one["steps"]]
    return Measured(
        largest["peak_bytes"],
        largest.get("flops", 0.0),
        largest.get("where", ""),
        largest.get("parts", {}),
        process_bytes=max(one["process_bytes"] for one in workers),
        sent_by_others_bytes=sum(one["sent"] for one in others) / sum(one["steps"] for one in others)
        if others
        else None,
    )
