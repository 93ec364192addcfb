"""Learning-rate schedules: any torch scheduler, stepped at the right moments and saved with the run.

    a scheduler                after every step
    PerEpoch(a scheduler)      after every round of the data
    ReduceLROnPlateau          after every validation, by the value of the job's goal

It is made from the job's own optimizer before any technique sees that, and techniques keep the optimizer's groups, so a
changed rate takes effect under all of them. It is stepped when the next batch is there, because only then is it known
whether another epoch has begun.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from inspect import Parameter
from typing import Any, ClassVar

import numpy as np
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from shoestring.core.errors import Mistake
from shoestring.core.job import Job, target
from shoestring.core.private import note_step_called, number_of
from shoestring.core.running.run import Run
from shoestring.core.running.run_state import RunState
from shoestring.core.user_code.seams import calls_user
from shoestring.core.user_code.user_functions import known_signature
from shoestring.core.workers.assignment import Assignment

EXAMPLE = "schedule=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)"


@dataclass(frozen=True)
class PerEpoch:
    """Wraps a scheduler to be stepped after every epoch: `schedule=lambda optimizer: PerEpoch(StepLR(optimizer,
    10))`."""

    scheduler: Any


class Schedule(RunState):
    """A run's scheduler, and how often it was stepped."""

    of_technique: ClassVar[bool] = False

    def __init__(self, scheduler: Any, unit: str, optimizer: Optimizer) -> None:
        self.scheduler, self.unit, self.optimizer = (
            scheduler,
            unit,
            optimizer,
        )  # the unit: "steps", "epochs" or "validations"
        self.begun = 0  # steps begun since this process started,
        self.before = 0  # and before the checkpoint that it resumed from
        self.times = 0  # how often the scheduler was stepped

    def begin_step(self, epochs: int, assignment: Assignment) -> None:
        """A step begins, after so many epochs: set its rate."""
        done = assignment.steps_done(self.begun, self.before)
        self.begun += 1
        due = {"steps": done, "epochs": epochs}.get(self.unit, 0)
        while self.times < due:
            self.step()

    def note_validation(self, value: float) -> None:
        """A validation found this value of the job's goal."""
        if self.unit == "validations":
            self.step(value)

    @calls_user("schedule")
    def step(self, *value: float) -> None:
        self.times += 1
        note_step_called(
            self.optimizer
        )  # techniques step the optimizer in ways that the scheduler does not see, and it would warn
        self.scheduler.step(*value)

    @property
    def rate(self) -> float:
        """The present rate of the first parameter group."""
        rate = self.optimizer.param_groups[0]["lr"]
        return number_of(rate) if isinstance(rate, Tensor) else float(rate)

    def state_dict(self) -> dict[str, Any]:
        return {
            "kind": type(self.scheduler).__name__,
            "begun": self.begun,
            "times": self.times,
            "scheduler": self.scheduler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        kind = type(self.scheduler).__name__
        if state["kind"] != kind:
            raise Mistake(
                f"the checkpoint was made with the schedule {state['kind']}, and the job's is a {kind} now: go on with "
                f"the schedule that the run was begun with, or begin anew with --fresh"
            )
        self.begun = self.before = state["begun"]
        self.times = state["times"]
        self.scheduler.load_state_dict(as_before(state["scheduler"], self.scheduler.state_dict()))


def as_before(saved: Any, fresh: Any) -> Any:
    """Saved state in its original types: a checkpoint has plain dicts, and some schedulers count in special ones."""
    if isinstance(saved, dict) and isinstance(fresh, Counter):
        return Counter(saved)
    if isinstance(saved, dict) and isinstance(fresh, dict):
        return {key: as_before(value, fresh.get(key)) for key, value in saved.items()}
    if isinstance(saved, list) and isinstance(fresh, list) and len(saved) == len(fresh):
        return [as_before(one, other) for one, other in zip(saved, fresh, strict=True)]
    return saved


@calls_user("schedule")
def with_schedule(job: Job, run: Run) -> Run:
    """The run with the job's schedule, if it has one."""
    if job.schedule is None:
        return run
    made = job.schedule(run.optimizer, run.settings.steps) if takes_steps(job) else job.schedule(run.optimizer)
    scheduler = made.scheduler if isinstance(made, PerEpoch) else made
    missing = [
        name for name in ("step", "state_dict", "load_state_dict") if not callable(getattr(scheduler, name, None))
    ]
    if missing or isinstance(scheduler, (type, Optimizer)):
        raise Mistake(
            f"the job's schedule gave {'None' if scheduler is None else f'a {type(scheduler).__name__}'}, which is no scheduler: "
            f"give a function that returns one, such as {EXAMPLE}"
        )
    if isinstance(scheduler, ReduceLROnPlateau):
        check_plateau(job, scheduler, made)
    unit = (
        "validations"
        if isinstance(scheduler, ReduceLROnPlateau)
        else "epochs"
        if isinstance(made, PerEpoch)
        else "steps"
    )
    schedule = Schedule(scheduler, unit, run.optimizer)
    if place := unsavable(scheduler.state_dict(), ""):
        raise Mistake(
            f"the job's schedule ({type(scheduler).__name__}) can't be saved in a checkpoint, and a resumed run would begin it "
            f"anew: its state has {place}. Numbers, text and tensors can be saved; give the class a state_dict made of those"
        )
    return replace(run, state={**run.state, "schedule": schedule})


def check_plateau(job: Job, scheduler: ReduceLROnPlateau, made: Any) -> None:
    """Refuse ReduceLROnPlateau without validation, or in the wrong direction."""
    if not job.validates:
        raise Mistake(
            "ReduceLROnPlateau lowers the rate when validation gets no better, and the Job does not validate: give "
            "held_out=lambda: batches, or validate=lambda model: {...}"
        )
    if isinstance(made, PerEpoch):
        raise Mistake(
            "PerEpoch(ReduceLROnPlateau(...)) in the job's schedule: it is stepped after every validation; give "
            'every="1 epoch" and leave PerEpoch out'
        )
    goal = target(job.goal)
    if (scheduler.mode == "max") != goal.most:
        raise Mistake(
            f"ReduceLROnPlateau(mode={scheduler.mode!r}) in the job's schedule and goal={job.goal!r} in the Job look for "
            f"opposite ends: give mode={'max' if goal.most else 'min'!r}"
        )


def takes_steps(job: Job) -> bool:
    """Whether the job's schedule takes the total number of steps: it has two required arguments."""
    if job.schedule is None:
        return False
    takes = known_signature(job.schedule)
    wanted = [
        one
        for one in (takes.parameters.values() if takes is not None else ())
        if one.default is Parameter.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    if len(wanted) > 2 or (len(wanted) == 2 and isinstance(job.schedule, type)):
        raise Mistake(
            f"the job's schedule wants {len(wanted)} arguments ({', '.join(one.name for one in wanted)}): give a function of the "
            f"optimizer, or of the optimizer and the steps in all, such as {EXAMPLE}"
        )
    return len(wanted) == 2


UNKNOWN_STEPS = (
    "the job's schedule wants to know how many steps there are in all, and nobody does: its data do not say how many batches "
    "an epoch has. Give the Job steps instead of epochs, data with a length, or a schedule=lambda optimizer: ... that does "
    "not ask"
)


def unsavable(value: Any, place: str) -> str:
    """A value in a state that JSON-like data can't restore, and where; empty if there is none."""
    if value is None or isinstance(value, (bool, int, float, str, Tensor, np.generic)):
        return ""
    if isinstance(value, np.ndarray) and value.dtype != object:
        return ""
    if isinstance(value, Mapping):
        return next(filter(None, (unsavable(one, f"{place}.{key}".lstrip(".")) for key, one in value.items())), "")
    if isinstance(value, (list, tuple)):
        return next(filter(None, (unsavable(one, f"{place}[{number}]") for number, one in enumerate(value))), "")
    return f"a {type(value).__name__} in {place}"


# Common schedules in one call

Maker = Callable[[Optimizer, int], LambdaLR]


def warmup_cosine(warmup: float = 0.1, floor: float = 0.0) -> Maker:
    """The rate rises linearly to the optimizer's own, then falls along half a cosine, for `Job(schedule=...)`.

    `warmup` is in steps (100), or a fraction of all steps (0.1). The rate falls to `floor`, a fraction of the
    optimizer's rate, which it would reach one step after the last.
    """
    return warmup_schedule("warmup_cosine", warmup, floor, lambda way: 0.5 * (1.0 + math.cos(math.pi * way)))


def warmup_linear(warmup: float = 0.1, floor: float = 0.0) -> Maker:
    """As `warmup_cosine`, with a linear fall."""
    return warmup_schedule("warmup_linear", warmup, floor, lambda way: 1.0 - way)


def warmup_schedule(name: str, warmup: float, floor: float, fall: Callable[[float], float]) -> Maker:
    if not 0.0 <= floor <= 1.0:
        raise Mistake(f"{name}(floor={floor}): the share of the rate that it falls to is a number from 0 to 1")
    if warmup < 0 or (warmup >= 1 and warmup != int(warmup)):
        raise Mistake(f"{name}(warmup={warmup}): give steps (100), or a share of all steps (0.1)")

    def schedule(optimizer: Optimizer, steps: int) -> LambdaLR:
        first = int(warmup) if warmup >= 1 else round(warmup * steps)
        if first > steps:
            raise Mistake(
                f"{name}(warmup={warmup}) in a run of {steps} steps would not end: give fewer steps of warm-up, or a share "
                f"of all steps (0.1)"
            )

        @calls_user("schedule")
        def factor(step: int) -> float:
            if step < first:
                return (step + 1) / first
            return floor + (1.0 - floor) * fall(min((step - first) / max(steps - first, 1), 1.0))

        return LambdaLR(optimizer, factor)

    return schedule
