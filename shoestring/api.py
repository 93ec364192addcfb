"""The library's door: plan, train, fit and verify, for people with their own script."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoestring.core import random_state
from shoestring.core.batch import Batch
from shoestring.core.budget import Budget
from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness, allowed
from shoestring.core.files import temporary_folder
from shoestring.core.hardware import Hardware, cluster
from shoestring.core.job import Job, default_forward, default_optimizer
from shoestring.core.run import brought_home
from shoestring.core.technique import in_order, parsed, text
from shoestring.core.training import TrainingTechnique as Technique
from shoestring.core.training import environment
from shoestring.course import Course
from shoestring.data.feed import Feed, counted
from shoestring.jobfile import job_path, loaded_job
from shoestring.loop import finite, steps
from shoestring.measure.instructions import require
from shoestring.measure.probe import known_hardware, remember
from shoestring.memory.precision import DTYPES
from shoestring.planning.catalogue import CATALOGUE, TOGETHER
from shoestring.planning.earlier import chosen_earlier, place_of, remember_choice
from shoestring.planning.evidence.gather import ledger_of_traits
from shoestring.planning.evidence.rehearsals import Rehearsals, Tell, silent
from shoestring.planning.evidence.rehearse import prepared
from shoestring.planning.evidence.tasks import R, Task, Worker
from shoestring.planning.kept import opened
from shoestring.planning.outcome import Outcome
from shoestring.planning.plan import Plan
from shoestring.planning.planner import Planner
from shoestring.processes.group.launch import run_group, threads
from shoestring.processes.known_job import about_job
from shoestring.processes.launch import run_worker
from shoestring.processes.tasks import LinkSpeedTask, TrainResult, TrainTask
from shoestring.runs.initial_weights import valued
from shoestring.runs.tensors import TensorFile

SHORT = {dtype: name for name, dtype in DTYPES.items()}   # of dtypes whose products may kill a process


class Step(NamedTuple):
    """One step of training."""

    number: int
    loss: float
    metrics: Mapping[str, float] = {}   # of the validation after it, if there was one


def plan(job: Job | str | Path, memory: str | int | None = None, use: Iterable[Technique | str] | None = None,
         inexact: bool = False, model: nn.Module | None = None, devices: int = 1, here: int | None = None,
         hardware: str | Path | None = None, exact: str | None = None, fresh: bool = False, tell: Tell = silent,
         **flags: Any) -> Outcome:
    """The best plan for a job (a Job, a job file or a built-in name) and a memory budget, of each of so many workers (`here`: on this
    machine, all if it is not said).

    `exact` is the least that the weights must be: "bits", "rounding" or "draws" (default: rounding if such a plan fits, else draws);
    `inexact` allows them to be changed. With `use`, the figures of exactly those techniques instead. With `hardware`, a file that
    describes a cluster, the plan for that. Raises OverBudget if nothing fits.

    What is measured of a job file is kept and not measured again while the job, its flags and the machine are the same; `fresh` measures
    it again. `tell` is called with a few words whenever something that takes time begins.
    """
    if allowed(exact, inexact)[-1] is Exactness.BITS and devices > 1:
        raise Mistake(f"{devices} workers add up in another order than one: what a group trains is {Exactness.ROUNDING.word} at best; "
                      f"give {Exactness.ROUNDING.flag}, or train with one worker")
    made = counted(job if isinstance(job, Job) else loaded_job(job_path(str(job)), flags))
    forced = None if use is None else tuple(
        parsed(one, CATALOGUE) if isinstance(one, str) else one for one in use)
    if forced is not None and devices > 1 and not any(one.unites for one in forced):
        forced = (*forced, TOGETHER)
    if hardware is not None:
        machine, worker = cluster(Path(hardware), devices), None
    else:
        machine = known_hardware(dtypes=inexact or any(one.computes_in for one in forced or ()))
        machine, worker = in_group(machine, devices, here or devices), workers(here or devices) if made.origin is not None else None
    kept = opened(about_job(made, machine, devices, here or devices), machine.flops, fresh) if (
        made.origin is not None and model is None and hardware is None) else None
    planner = Planner(made, machine, worker, model, inexact=inexact, exact=exact, wanted=forced or (), only=forced is not None,
                      devices=devices, here=here or devices, kept=kept, tell=tell)
    try:
        outcome = decided(planner, Budget.parsed(memory=memory).memory, forced)
    finally:
        if kept is not None:
            kept.save()
    return replace(outcome, measured=kept.when) if kept is not None and kept.used else outcome


def decided(planner: Planner, budget: int | None, forced: tuple[Technique, ...] | None) -> Outcome:
    """The planner's outcome. What was chosen when the same was asked before is chosen again, among plans that are as good."""
    origin, hardware = planner.job.origin, planner.hardware
    if origin is None or forced is not None or hardware.described:
        return planner.outcome(budget, forced)
    place = place_of(origin.file, {"flags": dict(origin.flags), "memory": budget, "inexact": planner.inexact, "exact": planner.exact,
                                   "devices": planner.devices, "here": planner.here})
    outcome = replace(planner, earlier=chosen_earlier(place)).outcome(budget)
    remember_choice(place, outcome.chosen)
    return outcome


def workers(count: int) -> Worker:
    """Who does tasks of planning: one process, or as many at once as will train, started as those will be."""
    def together(task: Task[R], environment: Mapping[str, str], /) -> R:
        return run_group(task, environment, devices=count)

    return run_worker if count == 1 else together


def in_group(machine: Hardware, world: int, here: int) -> Hardware:
    """The machine as one of so many workers on it has it; how they talk is measured once and kept. A network is taken to be as fast as
    this machine's own."""
    if world == 1:
        return machine
    count = max(here, 2)
    name = f"{count} {'near' if here == world else 'far'}"
    if name not in machine.links:
        with temporary_folder() as folder, ThreadPoolExecutor(count) as pool:
            tasks = [LinkSpeedTask(rank=rank, world=count, same_machine=here == world, store=f"{folder}/store") for rank in range(count)]
            first, *_ = pool.map(run_worker, tasks, [{**machine.environment, **threads(count)}] * count)
        machine = replace(machine, links={**machine.links, name: (first.per_byte, first.per_message, first.memory)})
        remember(machine)
    return replace(machine, environment={**machine.environment, **threads(here)}, cores=max(machine.cores // here, 1),
                   links={**machine.links, str(world): machine.links[name]})


def train(job: Job, plan: Plan | Outcome | Iterable[Technique] = (), model: nn.Module | None = None) -> Iterator[Step]:
    """Train in this process, yielding every step. The model is `model` if given, else the job's own."""
    techniques = plan.chosen.techniques if isinstance(plan, Outcome) else plan.techniques if isinstance(plan, Plan) else plan
    if model is None:
        random_state.seed(job.seed)
        model = valued(job.model(), job).to("cuda" if torch.cuda.is_available() else "cpu")
        random_state.seed(job.seed)
    for dtype in {parameter.dtype for parameter in model.parameters() if parameter.device.type == "cpu"}:
        if dtype in SHORT:   # Precision asks for itself
            require(SHORT[dtype])
    feed = Feed(job)
    run = prepared(replace(job, steps=feed.steps_in_all or job.steps), in_order(techniques), model)
    feed.assignment = run.assignment
    course = Course(job, run, feed)
    for number, loss in enumerate(steps(run, feed), 1):
        value = finite(float(loss), number)
        yield Step(number, value, course.validate(number).metrics if course.due(number) else {})
        if course.over(number):
            break
    brought_home(run)


@dataclass(frozen=True)
class Fitted:
    """What `fit` did."""

    outcome: Outcome
    losses: tuple[float, ...]


def fit(model: nn.Module, loss: Callable[[Any, Batch], Tensor], batches: Iterable[Batch], memory: str | int | None = None, *,
        steps: int | None = None, optimizer: Callable[..., torch.optim.Optimizer] = default_optimizer,
        forward: Callable[[nn.Module, Batch], Any] = default_forward, inexact: bool = False, clip: float = 0.0,
        exact: str | None = None) -> Fitted:
    """Train a model in place, within a memory budget, on batches that can be gone through again (a list, a DataLoader)."""
    if iter(batches) is batches:
        raise Mistake("fit was given an iterator, which can be gone through once; planning looks at the first batches too: "
                      "give a list, a DataLoader, or a Job with data=lambda: ...")
    count = steps if steps is not None else len(batches) if isinstance(batches, Sized) else 100
    job = Job(model=lambda: model, data=lambda: batches, loss=loss, forward=forward, optimizer=optimizer, steps=count, clip=clip)
    outcome = plan(job, memory, inexact=inexact, model=model, exact=exact)
    return Fitted(outcome, tuple(step.loss for step in train(job, outcome, model)))


def worker_environment(techniques: Iterable[Technique]) -> dict[str, str]:
    """Variables that a worker for these techniques starts with on this machine."""
    return {**known_hardware().environment, **environment(techniques)}


def verify(job: Job, plan: Plan | Outcome | Iterable[Technique], count: int = 5) -> tuple[bool, float]:
    """Train a few steps plainly and by the plan, from the same seed, in this process: same bits? largest difference."""
    short = replace(job, steps=count)
    states = []
    for techniques in ((), plan):
        random_state.seed(job.seed)
        model = valued(job.model(), job)
        random_state.seed(job.seed)
        for _ in train(short, techniques, model):
            pass
        states.append(model.state_dict())
    return compared(*states)


def compared(plain: Mapping[str, Tensor], planned: Mapping[str, Tensor]) -> tuple[bool, float]:
    """Whether two states are the same bits, and the largest difference between them."""
    most, equal = 0.0, True
    for name, value in plain.items():
        other = planned[name]
        if value.dtype != other.dtype or not torch.equal(value, other):
            equal = False
            most = max(most, (value.double() - other.double()).abs().max().item())
    return equal, most


ROUNDED = 1e-4   # of a loss: how far sums in another order may lead in a few steps


def verified(job: Job, plan: Plan, count: int) -> dict[str, Any]:
    """Plain training, each technique alone and the whole plan, each in a process of its own, side by side."""
    assert job.origin is not None, "only a job from a file can be made again in a child process"
    rehearsals = Rehearsals(job, known_hardware(), run_worker)
    ledger = ledger_of_traits(rehearsals, plan.techniques)
    with temporary_folder() as folder:
        def trained(techniques: tuple[Technique, ...], name: str) -> Trained:
            task = TrainTask(**rehearsals.about_job(techniques), steps=count, weights=f"{folder}/{name}")
            result = run_worker(task, worker_environment(techniques))
            return Trained(result, dict(TensorFile(Path(folder, name)).items()))

        plain = trained((), "plain")
        singles = plan.techniques if len(plan.techniques) > 1 else ()
        whole = trained(plan.techniques, "plan")
        verdicts = [verdict(text(one), min(plan.exactness, one.exactness(ledger)), plain, trained((one,), "one")) for one in singles]
        verdicts.append(verdict(str(plan), plan.exactness, plain, whole))
    last = verdicts[-1]
    return {
        "kept": all(one["kept"] is not False for one in verdicts), "exactness": plan.exactness.word,
        "bit_equal": last["bit_equal"], "largest_difference": last["largest_difference"], "steps": count,
        "predicted": {"peak_bytes": plan.peak_bytes, "process_bytes": plan.process_bytes, "step_seconds": plan.step_seconds},
        "measured": dict(whole.result.measured), "plain_measured": dict(plain.result.measured), "verdicts": verdicts,
        "losses": list(zip(plain.result.losses, whole.result.losses, strict=True)),
    }


class Trained(NamedTuple):
    """What a worker process trained."""

    result: TrainResult
    weights: Mapping[str, Tensor]


def verdict(name: str, level: Exactness, plain: Trained, other: Trained) -> dict[str, Any]:
    """What was found of a plan against the level that it states. What draws anew or is changed is promised nothing that one run of
    each could show: `kept` is then None."""
    equal, most = compared(plain.weights, other.weights)
    off = max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(plain.result.losses, other.result.losses, strict=True))
    kept = equal if level is Exactness.BITS else off < ROUNDED if level is Exactness.ROUNDING else None
    return {"technique": name, "bit_equal": equal, "largest_difference": most, "loss_difference": off,
            "stated": level.word, "kept": kept}
