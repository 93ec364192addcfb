"""The library's door: plan, train, fit and verify, for people with their own script."""
from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoestring.core import chance
from shoestring.core.batch import Batch
from shoestring.core.errors import Mistake
from shoestring.core.hardware import Hardware, cluster
from shoestring.core.job import Job, default_forward, default_optimizer
from shoestring.core.ledger import Ledger
from shoestring.core.run import brought_home
from shoestring.core.technique import Exactness, Technique, environment, exactness, in_order, parsed, text
from shoestring.core.units import parse_bytes
from shoestring.group import run_group
from shoestring.jobfile import job_path, loaded_job
from shoestring.launch import run_worker
from shoestring.loop import finite, steps
from shoestring.measure.probe import known_hardware, remember
from shoestring.memory.precision import Precision
from shoestring.parallel.average import Average
from shoestring.planning.catalogue import CATALOGUE
from shoestring.planning.conflicts import unites
from shoestring.planning.plan import Plan
from shoestring.planning.planner import Outcome, Planner, Worker
from shoestring.planning.rehearse import prepared
from shoestring.runs.tensors import TensorFile
from shoestring.runs.values import valued


class Step(NamedTuple):
    """One step of training."""

    number: int
    loss: float


def plan(job: Job | str | Path, memory: str | int | None = None, use: Iterable[Technique | str] | None = None,
         inexact: bool = False, model: nn.Module | None = None, devices: int = 1, here: int | None = None,
         hardware: str | Path | None = None, **flags: Any) -> Outcome:
    """The best plan for a job (a Job, a job file or a built-in name) and a memory budget, of each of so many workers (`here`: on this
    machine, all if it is not said).

    With `use`, the figures of exactly those techniques instead. With `hardware`, a file that describes a cluster, the plan for that.
    Raises OverBudget if nothing fits.
    """
    made = job if isinstance(job, Job) else loaded_job(job_path(str(job)), flags)
    forced = None if use is None else tuple(
        parsed(one, CATALOGUE) if isinstance(one, str) else one for one in use)
    if forced is not None and devices > 1 and not any(map(unites, forced)):
        forced = (*forced, Average())
    if hardware is not None:
        machine, worker = cluster(Path(hardware), devices), None
    else:
        machine = known_hardware(dtypes=inexact or any(isinstance(one, Precision) for one in forced or ()))
        machine, worker = in_group(machine, devices, here or devices), workers(here or devices) if made.origin is not None else None
    planner = Planner(made, machine, worker, model, inexact=inexact, wanted=forced or (), devices=devices, here=here or devices)
    return planner.outcome(None if memory is None else parse_bytes(memory), forced)


def workers(count: int) -> Worker:
    """Who does tasks of planning: one process, or as many at once as will train, started as those will be."""
    return run_worker if count == 1 else lambda task, environment: run_group(task, environment, devices=count)


def in_group(machine: Hardware, world: int, here: int) -> Hardware:
    """The machine as one of so many workers on it has it; how they talk is measured once and kept. A network is taken to be as fast as
    this machine's own."""
    if world == 1:
        return machine
    count = max(here, 2)
    name = f"{count} {'near' if here == world else 'far'}"
    if name not in machine.links:
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(count) as pool:
            tasks = [{"task": "cable", "rank": rank, "world": count, "near": here == world, "store": f"{folder}/store"}
                     for rank in range(count)]
            first, *_ = pool.map(run_worker, tasks, [shared(machine, count)] * count)
        machine = replace(machine, links={**machine.links, name: first["cable"]})
        remember(asdict(machine))
    return replace(machine, environment=shared(machine, here), cores=max(machine.cores // here, 1),
                   links={**machine.links, str(world): machine.links[name]})


def shared(machine: Hardware, devices: int) -> dict[str, str]:
    """Variables of workers that share the machine's cores."""
    return {**machine.environment, "OMP_NUM_THREADS": str(max(machine.cores // devices, 1))}


def train(job: Job, plan: Plan | Outcome | Iterable[Technique] = (), model: nn.Module | None = None) -> Iterator[Step]:
    """Train in this process, yielding every step. The model is `model` if given, else the job's own."""
    techniques = plan.chosen.techniques if isinstance(plan, Outcome) else plan.techniques if isinstance(plan, Plan) else plan
    if model is None:
        chance.seed(job.seed)
        model = valued(job.model(), job).to("cuda" if torch.cuda.is_available() else "cpu")
        chance.seed(job.seed)
    run = prepared(job, in_order(techniques), model)
    for number, loss in enumerate(steps(run, islice(job.batches(), job.steps)), 1):
        yield Step(number, finite(float(loss), number))
    brought_home(run)


@dataclass(frozen=True)
class Fitted:
    """What `fit` did."""

    outcome: Outcome
    losses: tuple[float, ...]


def fit(model: nn.Module, loss: Callable[[Any, Batch], Tensor], batches: Iterable[Batch], memory: str | int | None = None, *,
        steps: int | None = None, optimizer: Callable[..., torch.optim.Optimizer] = default_optimizer,
        forward: Callable[[nn.Module, Batch], Any] = default_forward, inexact: bool = False, clip: float = 0.0) -> Fitted:
    """Train a model in place, within a memory budget, on batches that can be gone through again (a list, a DataLoader)."""
    if iter(batches) is batches:
        raise Mistake("fit was given an iterator, which can be gone through once; planning looks at the first batches too: "
                      "give a list, a DataLoader, or a Job with data=lambda: ...")
    count = steps if steps is not None else len(batches) if isinstance(batches, Sized) else 100
    job = Job(model=lambda: model, data=lambda: batches, loss=loss, forward=forward, optimizer=optimizer, steps=count, clip=clip)
    outcome = plan(job, memory, inexact=inexact, model=model)
    return Fitted(outcome, tuple(step.loss for step in train(job, outcome, model)))


def worker_environment(techniques: Iterable[Technique]) -> dict[str, str]:
    """Variables that a worker for these techniques starts with on this machine."""
    return {**known_hardware().environment, **environment(techniques)}


def verify(job: Job, plan: Plan | Outcome | Iterable[Technique], count: int = 5) -> tuple[bool, float]:
    """Train a few steps plainly and by the plan, from the same seed, in this process: same bits? largest difference."""
    short = replace(job, steps=count)
    states = []
    for techniques in ((), plan):
        chance.seed(job.seed)
        model = valued(job.model(), job)
        chance.seed(job.seed)
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


STATED = {Exactness.BITS: "the same bits", Exactness.ROUNDING: "losses within 0.01 %",
          Exactness.DRAWS: "other draws of the same distribution", Exactness.CHANGED: "other numbers"}


def verified(job: Job, plan: Plan, count: int) -> dict[str, Any]:
    """Plain training, each technique alone and the whole plan, each in a process of its own, side by side."""
    assert job.origin is not None, "only a job from a file can be made again in a child process"
    planner = Planner(job, known_hardware(), run_worker, wanted=plan.techniques)
    traits = planner.ledger_traits()
    with tempfile.TemporaryDirectory() as folder:
        def trained(techniques: tuple[Technique, ...], name: str) -> dict[str, Any]:
            task = planner.task("train", techniques, steps=count, weights=f"{folder}/{name}")
            result = run_worker(task, worker_environment(techniques))
            return result | {"weights": dict(TensorFile(Path(folder, name)).items())}

        plain = trained((), "plain")
        singles = plan.techniques if len(plan.techniques) > 1 else ()
        whole = trained(plan.techniques, "plan")
        verdicts = [verdict(text(one), (one,), plain, trained((one,), "one"), traits) for one in singles]
        verdicts.append(verdict(str(plan), plan.techniques, plain, whole, traits))
    last = verdicts[-1]
    return {
        "bit_equal": last["bit_equal"], "largest_difference": last["largest_difference"], "steps": count,
        "predicted": {"peak_bytes": plan.peak_bytes, "process_bytes": plan.process_bytes, "step_seconds": plan.step_seconds},
        "measured": whole["measured"], "plain_measured": plain["measured"], "verdicts": verdicts,
        "losses": list(zip(plain["losses"], whole["losses"], strict=True)),
    }


def verdict(name: str, techniques: tuple[Technique, ...], plain: dict[str, Any], other: dict[str, Any],
            traits: Ledger) -> dict[str, Any]:
    """What was found of a plan against what it states."""
    equal, most = compared(plain["weights"], other["weights"])
    level = max((exactness(technique, traits) for technique in techniques), default=Exactness.BITS)
    off = max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(plain["losses"], other["losses"], strict=True))
    kept = equal if level is Exactness.BITS else off < 1e-4 if level is Exactness.ROUNDING else True
    return {"technique": name, "bit_equal": equal, "largest_difference": most, "loss_difference": off,
            "stated": STATED[level], "kept": kept}
