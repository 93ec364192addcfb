"""The library's functions plan, train, fit and verify, for use in your own script.

`plan`, `train` and `verify` take the same kinds of job: a Job, the path of a job file, or the name of a built-in job
with its flags; and `steps`, `epochs` and `seed` to replace the job's. Their errors speak of arguments; the commands,
whose errors speak of flags, call `plan_job`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import get_terminal_size
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoestring.core.batch import Batch
from shoestring.core.command_line.options import as_arguments, speaking_of_arguments
from shoestring.core.errors import Mistake
from shoestring.core.files.files import temporary_folder
from shoestring.core.job import Job, default_forward, default_optimizer
from shoestring.core.running import random_state
from shoestring.core.user_code.data_objects import GivenData
from shoestring.data.elements import check_held_out
from shoestring.data.feed import first_steps
from shoestring.jobfile import Course, job_path, load_job, with_course
from shoestring.planning.plan import Outcome, Plan
from shoestring.runs.options import RunOptions
from shoestring.runs.reports.report import Report
from shoestring.runs.weights.initial_weights import fill_weights
from shoestring.show.terminal import PIPE, Screen
from shoestring.training.evidence.as_found import as_found
from shoestring.training.evidence.rehearsals import Tell, silent
from shoestring.training.execution.job_planning import plan_job, workers
from shoestring.training.execution.scripts.script_group import group_of
from shoestring.training.execution.scripts.script_steps import ScriptStep, kept_steps, steps_here, worker_of
from shoestring.training.execution.scripts.sent_job import Given, refuse_while_imported, send_job
from shoestring.training.execution.verification import Verified, compare_weights
from shoestring.training.options import PlanOptions, VerifyCommand
from shoestring.training.planning.named_plan import check_named, given_techniques, techniques_for, unchecked_techniques
from shoestring.training.planning.plan import TrainingOutcome, TrainingPlan
from shoestring.training.report.outcome_text import training_outcome_text
from shoestring.training.technique import TrainingTechnique as Technique


class Step(NamedTuple):
    """One step of training, as `train` yields it: `for step in shoestring.train(job, plan): print(step.number,
    step.loss)`."""

    number: int  # counts from 1
    loss: float
    metrics: Mapping[str, float] = {}  # of the validation after it, if there was one


Jobs = Job | str | Path  # a Job, the path of a job file, or the name of a built-in job


def plan(
    job: Jobs,
    memory: str | int | None = None,
    use: Iterable[Technique | str] | None = None,
    *,
    exact: str | None = None,
    inexact: bool = False,
    fresh_plan: bool = False,
    model: nn.Module | None = None,
    devices: int = 1,
    here: int | None = None,
    hardware: str | Path | None = None,
    tell: Tell = silent,
    steps: int | None = None,
    epochs: int | None = None,
    seed: int | None = None,
    **flags: Any,
) -> TrainingOutcome:
    """The best plan for a job and a memory budget; `print` it to see it as a table.

        outcome = shoestring.plan("my.py", memory="600MiB", width=512)
        print(outcome)
        for step in shoestring.train("my.py", outcome, width=512): ...

    job         a Job, the path of a job file, or the name of a built-in one ("gpt", "digits"); `flags` are the job file's own
    memory      largest size of the process, without data-loading workers: "600MiB", "2GB" or a number (default: what is free)
    use         predict exactly these techniques instead of choosing: ["Checkpoint(every=2)", FusedOptimizer()]
    exact       how close weights must stay: "bits", "rounding" or "distribution" (default: rounding if such a plan fits, else distribution)
    inexact     allow plans whose weights differ from plain training's (level "changed")
    model       plan for this model object instead of the job's
    devices     workers that train together; the budget is for each. `here`: how many are on this machine (default: all)
    hardware    a file that describes a cluster: plan for that
    fresh_plan  measure again; by default, measurements of the same job file on this machine are used again
    tell        called with a short progress message when something slow begins: `tell=print`
    steps, epochs, seed    replace the job's; giving only one of steps and epochs drops the job's other one

    Raises Mistake if something can't work, and OverBudget if nothing fits.
    """
    with speaking_of_arguments(), random_state.fork_rng():
        refuse_while_imported("plan")
        outcome = plan_job(
            made_job(job, Course(steps, epochs, seed), flags),
            PlanOptions(memory, as_tuple(use), None, fresh_plan, exact, inexact),
            devices,
            here,
            model=model,
            hardware=hardware,
            on_progress=lambda doing, expected: tell(doing),
        )
    return for_script(outcome)


def for_script(outcome: TrainingOutcome) -> TrainingOutcome:
    """An outcome that prints as the command's table, with arguments in place of flags."""
    refused = tuple((name, as_arguments(why)) for name, why in outcome.refused)
    return replace(outcome, refused=refused, draw=text_for_script)


def text_for_script(outcome: TrainingOutcome) -> str:
    width = get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else 0
    return training_outcome_text(outcome, Screen(width) if width else PIPE)


def as_tuple(use: Iterable[Technique | str] | None) -> tuple[Technique | str, ...] | None:
    return None if use is None else tuple(use)


def made_job(job: Jobs, course: Course, flags: Mapping[str, Any]) -> Job:
    """The job that the caller's arguments describe."""
    if not isinstance(job, Job):
        return load_job(job_path(str(job)), {**flags, **course.values})
    if flags:
        raise Mistake(
            f"{', '.join(flags)}: arguments of a job file, and this is a Job, which is made already: make it with them"
        )
    return with_course(job, course.values)


def train(
    job: Jobs,
    plan: TrainingPlan | TrainingOutcome | Iterable[Technique | str] = (),
    model: nn.Module | None = None,
    *,
    run: str | Path | None = None,
    fresh: bool = False,
    adopt: bool = False,
    save_every: int | str = "1m",
    keep: int = 3,
    devices: int = 1,
    steps: int | None = None,
    epochs: int | None = None,
    seed: int | None = None,
    **flags: Any,
) -> Iterator[Step]:
    """Train in this process, step by step: each step runs when it is requested, and `break` ends training.

        for step in shoestring.train(job, shoestring.plan(job, memory="600MiB")):
            print(step.number, step.loss, step.metrics)

    job         as for `plan`: a Job, a job file with its flags, or a built-in name; `steps`, `epochs` and `seed` replace the job's
    plan        the result of `plan`, a Plan, or techniques; nothing: plain training
    model       train this model object in place; else the job makes one
    run         a folder that keeps the run, like that of `shoestring train`: after a kill, a stop or a `break`, the same call resumes from
                its last checkpoint, with its original plan and the same bits; `shoestring watch` shows it meanwhile. A finished run yields
                no more steps, and loads its weights into `model`
    fresh, adopt, save_every, keep    for such a run: start over and keep the old run aside; resume although the job changed; how often
                it is saved (50 steps, "5m"), and how many checkpoints stay beside the best one
    devices     train with so many processes on this machine, by a plan for as many (default: DataParallel). They run ahead of the
                requested steps. Objects that they need are pickled, and they import the script to find its classes and functions:
                call it under `if __name__ == "__main__":`, and define those at the top level
    """
    with speaking_of_arguments(), random_state.fork_rng():
        refuse_while_imported("train", devices)
        made, kept = made_job(job, Course(steps, epochs, seed), flags), RunOptions(run, fresh, adopt, save_every, keep)
        kept.check()
    if devices > 1:
        return speak_of_arguments(steps_of_group(made, plan, model, kept, devices))
    return speak_of_arguments(
        train_here(made, plan, model) if run is None else as_steps(kept_steps(made, plan, model, kept))
    )


def steps_of_group(
    job: Job,
    plan: TrainingPlan | TrainingOutcome | Iterable[Technique | str],
    model: nn.Module | None,
    asked: RunOptions,
    devices: int,
) -> Generator[Step, None, None]:
    """Train with separate processes."""
    with temporary_folder() as folder:
        sent_job = send_job(job, model, folder, devices)
        if isinstance(plan, (Plan, Outcome)):
            check_named(sent_job, unchecked_techniques(plan, job), model, workers(devices), devices=devices)
            outcome = Outcome(plan) if isinstance(plan, Plan) else plan
        else:
            outcome = plan_job(sent_job, PlanOptions(use=given_techniques(plan)), devices, model=model)
        kept = replace(asked, run=asked.run or folder / "run")
        yield from as_steps(group_of(job, sent_job, outcome, model, kept, devices).steps())


def as_steps(found: Iterable[ScriptStep]) -> Generator[Step, None, None]:
    for number, loss, metrics in found:
        yield Step(number, loss, metrics)


def speak_of_arguments(found: Generator[Step, None, None]) -> Iterator[Step]:
    """The same steps: errors are worded for a script, and random draws are kept apart from the script's."""
    with speaking_of_arguments():
        yield from random_state.drawing_apart(found)


def train_here(
    job: Job, plan: TrainingPlan | TrainingOutcome | Iterable[Technique | str], model: nn.Module | None
) -> Generator[Step, None, None]:
    check_held_out(job)
    yield from as_steps(steps_here(job, techniques_for(job, plan, model, worker_of(job, model)), model))


@dataclass(frozen=True)
class FitResult:
    """The result of `fit`; `print` it to see the plan as a table, and the loss."""

    outcome: TrainingOutcome  # of planning: the chosen plan, plain training, runners-up
    losses: tuple[float, ...]  # of every step
    report: Report | None = None  # with several devices: measurements and the timeline

    def __str__(self) -> str:
        from shoestring.show.cut import model_cut
        from shoestring.show.timeline import cut_text

        told = self.report
        cut = [cut_text(model_cut(told.plan.cut, told.timed))] if told is not None and told.plan.cut is not None else []
        return "\n\n".join((str(self.outcome), *cut, self.course))

    @property
    def course(self) -> str:
        """How the loss developed."""
        return (
            f"loss {self.losses[0]:.3f} -> {self.losses[-1]:.3f} in {len(self.losses)} steps"
            if self.losses
            else "no step was done"
        )


def fit(
    model: nn.Module,
    loss: Callable[[Any, Batch], Tensor],
    batches: Iterable[Batch],
    memory: str | int | None = None,
    use: Iterable[Technique | str] | None = None,
    *,
    steps: int | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = default_optimizer,
    forward: Callable[[nn.Module, Batch], Any] = default_forward,
    clip: float = 0.0,
    exact: str | None = None,
    inexact: bool = False,
    fresh_plan: bool = False,
    run: str | Path | None = None,
    fresh: bool = False,
    adopt: bool = False,
    save_every: int | str = "1m",
    keep: int = 3,
    devices: int = 1,
) -> FitResult:
    """Plan for a model, then train it in place, within a memory budget.

        fitted = shoestring.fit(model, lambda output, batch: cross_entropy(output, batch[1]), loader, memory="2GiB")
        print(fitted)

    loss        a function of the model's output and the batch
    batches     a source that can be iterated again: a list, a DataLoader
    steps       default: one pass over the batches; more start over
    optimizer, forward, clip    as for a Job
    memory, use, exact, inexact, fresh_plan    as for `plan`
    run         a folder that keeps the run, as for `train`: the same call resumes it; fresh, adopt, save_every, keep    as for `train`
    devices     train with so many processes on this machine, each within `memory`; the planner chooses how (replicas of the model,
                or parts of it). As for `train`: call it under `if __name__ == "__main__":`, with pickled objects defined at the top level
    """
    asked, kept = (
        PlanOptions(memory, as_tuple(use), None, fresh_plan, exact, inexact),
        RunOptions(run, fresh, adopt, save_every, keep),
    )
    with speaking_of_arguments():
        refuse_while_imported("fit", devices)
        kept.check()
    if isinstance(batches, Iterator):
        raise Mistake(
            "fit was given an iterator, which can be read only once; planning reads the first batches too: give a list, a "
            "DataLoader, or a Job with data=lambda: ..."
        )
    count = steps if steps is not None else len(batches) if isinstance(batches, Sized) else 100
    data = GivenData(batches, checked=run is None)  # without a run folder, batches may differ from round to round
    job = Job(model=Given(model), data=data, loss=loss, forward=forward, optimizer=optimizer, steps=count, clip=clip)
    if devices > 1:
        with speaking_of_arguments(), random_state.fork_rng(), temporary_folder() as folder:
            return fit_by_group(job, model, asked, replace(kept, run=run or folder / "run"), devices, folder)
    with speaking_of_arguments(), random_state.fork_rng():
        outcome = for_script(plan_job(job, asked, model=model))
    steps_done = train(job, outcome, model, run=run, fresh=fresh, adopt=adopt, save_every=save_every, keep=keep)
    return FitResult(outcome, tuple(step.loss for step in steps_done))


def fit_by_group(
    job: Job, model: nn.Module, asked: PlanOptions, kept: RunOptions, devices: int, folder: Path
) -> FitResult:
    sent_job = send_job(job, model, folder, devices)
    found = plan_job(sent_job, asked, devices, model=model)
    report = group_of(job, sent_job, found, model, kept, devices).run()
    return FitResult(for_script(found), tuple(report.curves.losses), report)


def verify(
    job: Jobs,
    plan: TrainingPlan | TrainingOutcome | Iterable[Technique | str],
    check_steps: int = 5,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    seed: int | None = None,
    **flags: Any,
) -> Verified:
    """Train `check_steps` steps plainly and with the plan, from the same seed, in this process, and compare the weights.

        same_bits, largest_difference = shoestring.verify(job, (Checkpoint(every=2),))

    job, steps, epochs, seed, flags    as for `plan`
    plan        the result of `plan`, a Plan, or techniques
    """
    with speaking_of_arguments(), random_state.fork_rng():
        refuse_while_imported("verify")
        VerifyCommand(check_steps=check_steps).check()
        made = made_job(job, Course(steps, epochs, seed), flags)
        short = first_steps(made, check_steps)
        states = []
        for techniques in ((), techniques_for(made, plan, None, worker_of(made, None))):
            random_state.seed(made.seed)
            model = fill_weights(made.model(), made)
            with as_found(made):
                for _ in steps_here(short, techniques, model):
                    pass
            states.append(model.state_dict())
        return compare_weights(*states)
