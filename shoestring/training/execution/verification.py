"""Plain training and a plan side by side, each in a process of its own, for `shoestring verify`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoestring.core.costs.hardware import Hardware
from shoestring.core.exactness import Exactness
from shoestring.core.files.files import temporary_folder
from shoestring.core.job import Job
from shoestring.core.technique import text
from shoestring.measure.instructions import cap, cap_this_process
from shoestring.measure.probe import known_hardware
from shoestring.processes.launch import run_worker
from shoestring.runs.weights.tensors import TensorFile
from shoestring.training.evidence.gather import ledger_of_traits
from shoestring.training.evidence.rehearsals import Rehearsals
from shoestring.training.execution.batch_sizes import ExpectedBatches
from shoestring.training.execution.tasks import TrainResult, TrainTask
from shoestring.training.planning.plan import TrainingPlan
from shoestring.training.technique import TrainingTechnique as Technique
from shoestring.training.technique import environment


def worker_environment(techniques: Iterable[Technique]) -> dict[str, str]:
    """Environment variables for a worker with these techniques on this machine."""
    cap_this_process()
    return {**cap(), **environment(techniques)}  # nothing here needs measuring


class Verified(NamedTuple):
    """The result of `verify`."""

    same_bits: bool
    largest_difference: float  # between two corresponding weights

    def __str__(self) -> str:
        return (
            "the same bits"
            if self.same_bits
            else f"not the same bits: weights differ by {self.largest_difference:.2g} at most"
        )


def compare_weights(plain: Mapping[str, Tensor], planned: Mapping[str, Tensor]) -> Verified:
    """Whether two states have the same bits, and their largest difference."""
    most, equal = 0.0, True
    for name, value in plain.items():
        other = planned[name]
        if value.dtype != other.dtype or not torch.equal(value, other):
            equal = False
            most = max(most, (value.double() - other.double()).abs().max().item())
    return Verified(equal, most)


ROUNDED = 1e-4  # relative difference of losses that sums in another order may cause in a few steps


def verify_plan(job: Job, plan: TrainingPlan, count: int) -> dict[str, Any]:
    """Plain training, each technique alone and the whole plan, each in its own process, side by side."""
    assert job.origin is not None, "only a job from a file can be made again in a child process"
    singles = plan.techniques if len(plan.techniques) > 1 else ()
    rehearsals = Rehearsals(job, known_hardware() if singles else Hardware(), run_worker)
    levels = own_levels(rehearsals, singles)
    with temporary_folder() as folder:

        def train_with(techniques: tuple[Technique, ...], name: str) -> TrainedWeights:
            task = TrainTask(
                **rehearsals.about_job(techniques),
                steps=count,
                weights=f"{folder}/{name}",
                expected=ExpectedBatches(tracked=plan.details.looked),
            )
            result = run_worker(task, worker_environment(techniques))
            return TrainedWeights(result, dict(TensorFile(Path(folder, name)).items()))

        plain = train_with((), "plain")
        whole = train_with(plan.techniques, "plan")
        verdicts = [
            verdict(text(one), min(plan.exactness, level), plain, train_with((one,), "one"))
            for one, level in zip(singles, levels, strict=True)
        ]
        verdicts.append(verdict(str(plan), plan.exactness, plain, whole))
    last = verdicts[-1]
    return {
        "kept": all(one["kept"] is not False for one in verdicts),
        "exactness": plan.exactness.word,
        "bit_equal": last["bit_equal"],
        "largest_difference": last["largest_difference"],
        "steps": count,
        "predicted": {name: plan.predicted[name] for name in ("peak_bytes", "process_bytes", "step_seconds")},
        "measured": dict(whole.result.measured),
        "plain_measured": dict(plain.result.measured),
        "verdicts": verdicts,
        "losses": list(zip(plain.result.losses, whole.result.losses, strict=True)),
    }


def own_levels(rehearsals: Rehearsals, techniques: tuple[Technique, ...]) -> list[Exactness]:
    """How close each technique alone stays to plain training of a job."""
    if not techniques:  # plain training needs no inspection of the model
        return []
    ledger = ledger_of_traits(rehearsals, techniques)
    return [one.exactness(ledger) for one in techniques]


class TrainedWeights(NamedTuple):
    """The result of a worker process's training."""

    result: TrainResult
    weights: Mapping[str, Tensor]


def verdict(name: str, level: Exactness, plain: TrainedWeights, other: TrainedWeights) -> dict[str, Any]:
    """A plan's result against the level that it states. For `draws` and `changed` one run can't prove anything: `kept`
    is then None."""
    equal, most = compare_weights(plain.weights, other.weights)
    off = max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(plain.result.losses, other.result.losses, strict=True))
    kept = equal if level is Exactness.BITS else off < ROUNDED if level is Exactness.ROUNDING else None
    return {
        "technique": name,
        "bit_equal": equal,
        "largest_difference": most,
        "loss_difference": off,
        "stated": level.word,
        "kept": kept,
    }
