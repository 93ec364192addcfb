"""Plan a job on this machine or for a described cluster: called by `shoestring.plan` and the commands. Errors speak of
flags.

The machine is measured, child processes run tasks of a job file, and earlier measurements are used again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from torch import nn

from shoestring.core.costs.hardware import Hardware, cluster, for_group, measured_group
from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness, allowed_levels
from shoestring.core.files.files import temporary_folder
from shoestring.core.job import Job
from shoestring.core.technique import parse_technique
from shoestring.data.feed import with_step_count
from shoestring.data.lengths import shared_data
from shoestring.measure.probe import busy_now, known_hardware, remember
from shoestring.planning.answers import MeasuredAnswers, open_answers, without_numbers
from shoestring.processes.group.launch import run_group, threads
from shoestring.processes.launch import run_worker
from shoestring.processes.nodes import Team
from shoestring.processes.task import R, Task, Worker
from shoestring.training.catalogue import CATALOGUE, TOGETHER
from shoestring.training.evidence.as_found import as_found
from shoestring.training.evidence.duration import expected_seconds, remember_seconds
from shoestring.training.evidence.earlier import chosen_earlier, place_of, remember_choice
from shoestring.training.evidence.plain_only import is_an_answer
from shoestring.training.execution.job_key import about_job
from shoestring.training.execution.tasks import LinkSpeedTask
from shoestring.training.group_technique import mesh_sizes, uniting
from shoestring.training.options import PlanOptions
from shoestring.training.planning.named_plan import check_named
from shoestring.training.planning.plan import TrainingOutcome
from shoestring.training.planning.planner import Planner
from shoestring.training.technique import TrainingTechnique as Technique

NOTHING_ASKED = PlanOptions()
Doing = Callable[
    [str, float | None], None
]  # called with what planning is doing, and the expected total seconds if known


def plan_job(
    job: Job,
    asked: PlanOptions = NOTHING_ASKED,
    devices: int = 1,
    here: int | None = None,
    *,
    model: nn.Module | None = None,
    hardware: str | Path | None = None,
    on_progress: Doing = lambda doing, expected: None,
) -> TrainingOutcome:
    """The planner's outcome; `devices`: workers that train together, of which `here` are on this machine;
    `on_progress`: called with what is being done."""
    use, inexact, exact = asked.use, asked.inexact, asked.exact
    budget = asked.budget
    if allowed_levels(exact, inexact)[-1] is Exactness.BITS and devices > 1:
        raise Mistake(
            f"{devices} workers add up in another order than one: what a group trains is {Exactness.ROUNDING.word} at best; "
            f"give {Exactness.ROUNDING.flag}, or train with one worker"
        )
    made = with_step_count(shared_data(job))
    place = question(made, asked.memory, use, inexact, exact, devices) if made.origin is not None else None
    expected = expected_seconds(place) if place is not None else None
    forced = (
        None if use is None else tuple(parse_technique(one, CATALOGUE) if isinstance(one, str) else one for one in use)
    )
    if forced is not None and devices > 1 and not uniting(forced):
        forced = (*forced, TOGETHER)
    mesh_sizes(forced or (), devices)  # refuses an impossible mesh before anything is measured
    machine = machine_for(hardware, devices, here or devices, inexact or any(one.computes_in for one in forced or ()))
    worker = workers(here or devices) if made.origin is not None and hardware is None else None
    planner = Planner(
        made,
        machine if isinstance(machine, Hardware) else Hardware(),
        worker,
        model,
        inexact=inexact,
        exact=exact,
        wanted=forced or (),
        only=forced is not None,
        devices=devices,
        here=here or devices,
        tell=lambda doing: on_progress(doing, expected),
    )
    if not isinstance(machine, Hardware):
        found = replace(planner.plain_only(machine), subject="this machine")
        outcome = planner.plain_outcome(found, budget, forced or ())
        return replace(outcome, chosen=replace(outcome.chosen, made_for=job))
    kept = (
        stored_answers(made, machine, devices, here or devices, asked.fresh_plan)
        if model is None and hardware is None
        else None
    )
    planner.kept = kept
    try:
        with as_found(made):
            outcome = choose(planner, budget, forced)
    except Exception as error:
        if kept is None or not kept.used or is_an_answer(error):
            raise
        kept.added = (
            False  # kept values have the right types but make no sense: ignore them, and they will be overwritten
        )
        again = replace(asked, fresh_plan=True)
        return plan_job(job, again, devices, here, model=model, hardware=hardware, on_progress=on_progress)
    finally:
        if kept is not None:
            kept.save()
    if place is not None and not (kept is not None and kept.used):  # with kept measurements, planning is fast anyway
        remember_seconds(place, outcome.seconds)
    return replace(
        outcome,
        chosen=replace(outcome.chosen, made_for=job),
        measured_at=kept.when if kept is not None and kept.used else 0.0,
    )


def machine_for(file: str | Path | None, devices: int, here: int, dtypes: bool) -> Hardware | Exception:
    """The machine to plan for: the one in a file, or this one, shared by so many workers. If measuring this one fails,
    the error: training does not need it."""
    if file is not None:
        return cluster(Path(file), devices)
    try:
        return in_group(known_hardware(dtypes=dtypes), devices, here)
    except Exception as error:
        if is_an_answer(error):
            raise
        return error


def check_here(job: Job, techniques: tuple[Technique, ...], exact: str | None, devices: int, here: int) -> None:
    """Refuse techniques from a file, such as a run's plan, that can't be used for a job; earlier measurements of this
    job are used again."""
    made, machine = with_step_count(shared_data(job)), machine_for(None, devices, here, False)
    kept = stored_answers(made, machine, devices, here, False) if isinstance(machine, Hardware) else None
    try:
        check_named(
            made, techniques, None, workers(here) if made.origin is not None else None, exact, devices, here, kept
        )
    finally:
        if kept is not None:
            kept.save()


def stored_answers(job: Job, machine: Hardware, devices: int, here: int, fresh: bool) -> MeasuredAnswers | None:
    """Measurements of earlier plannings of a job file; None if none are stored, or the job has no key."""
    if job.origin is None:
        return None
    try:
        return open_answers(about_job(job, machine, devices, here), machine.flops, fresh)
    except Exception as error:
        if is_an_answer(error):
            raise
        return None


def choose(planner: Planner, budget: int | None, forced: tuple[Technique, ...] | None) -> TrainingOutcome:
    """The planner's outcome. Among equally good plans, the earlier choice for the same question is chosen again."""
    origin, hardware = planner.job.origin, planner.hardware
    if origin is None or forced is not None or hardware.described:
        return planner.outcome(budget, forced)
    place = place_of(
        origin.file,
        {
            "flags": without_numbers(dict(origin.flags)),
            "memory": budget,
            "inexact": planner.inexact,
            "exact": planner.exact,
            "devices": planner.devices,
            "here": planner.here,
        },
    )
    outcome = replace(planner, earlier=chosen_earlier(place)).outcome(budget)
    remember_choice(place, outcome.chosen)
    return outcome


def question(job: Job, *asked: object) -> Path:
    """The question that planning answers: the job file and all options."""
    assert job.origin is not None, "only a job from a file can be asked about again"
    return place_of(job.origin.file, {"flags": dict(job.origin.flags), "asked": str(asked)})


def workers(count: int) -> Worker:
    """A function that runs planning's tasks: in one process, or in as many at once as will train, started in the same
    way."""

    def together(task: Task[R], environment: Mapping[str, str], /) -> R:
        return run_group(task, environment, Team(count))

    return run_worker if count == 1 else together


def in_group(machine: Hardware, world: int, here: int) -> Hardware:
    """The machine as shared by `here` of `world` workers; how they communicate is measured once and kept, and again
    when the machine is quiet. A network is assumed to be as fast as this machine's own."""
    if world == 1:
        return machine
    count = max(here, 2)
    name = f"{count} {'near' if here == world else 'far'}"
    known = machine.sums.get(name, {})  # incomplete if the machine was busy
    if not known or (len(known) == 1 and machine.device == "cpu" and not busy_now()):
        busy = busy_now()
        with temporary_folder() as folder, ThreadPoolExecutor(count) as pool:
            tasks = [
                LinkSpeedTask(rank=rank, world=count, same_machine=here == world, store=f"{folder}/store")
                for rank in range(count)
            ]
            first, *_ = pool.map(run_worker, tasks, [{**machine.environment, **threads(count)}] * count)
        machine = measured_group(machine, name, count, first.ways, first.memory, busy or busy_now())
        remember(machine)
    return for_group(
        replace(machine, environment={**machine.environment, **threads(here)}, cores=max(machine.cores // here, 1)),
        name,
        world,
        here,
    )
