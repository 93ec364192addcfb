"""Makes a task from command-line options: models from runs, candidates from settings, devices drawn by the seed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoestring.core.errors import Mistake
from shoestring.core.files.codec import finite_json, to_json
from shoestring.core.job import Job
from shoestring.federated.devices.records import records_of
from shoestring.federated.model.saved_weights import row_of
from shoestring.federated.planning.prepare import Prepared
from shoestring.federated.playing.fold import COMPARISONS, ABRow, ABTable, ABTables, comparisons_in
from shoestring.federated.playing.seeds import generator_of
from shoestring.federated.simulation.cohort import Engine
from shoestring.federated.tasks.compare import Comparison
from shoestring.federated.tasks.gather import Cohort
from shoestring.federated.tasks.privacy.registry import Registry
from shoestring.federated.tasks.settings import TuneCandidate, Value, text_of
from shoestring.federated.tasks.task import Attachment, FederatedTask, code_of
from shoestring.runs.folder import Folder
from shoestring.runs.reports.export import checkpoint_of

INITIAL = "the job's own"  # name of the job's initial model


def models_of(given: Prepared, runs: Sequence[str]) -> dict[str, Tensor]:
    """The weights of runs, by name; without any run, the job's initial weights."""
    found: dict[str, Tensor] = {}
    for run in runs:
        if not Path(run, "run.json").exists():
            raise Mistake(f"{run} is no run: give a folder that shoestring federate or train made (--run)")
        found[name_of(run, found)] = row_of(checkpoint_of(Folder(Path(run)), None), given.layout)
    return found or {INITIAL: given.row}


def name_of(run: str, taken: dict[str, Tensor]) -> str:
    return Path(run).name if Path(run).name not in taken else str(run)


def candidates_of(
    settings: Sequence[dict[str, Value]], models: Sequence[str], trains: bool
) -> tuple[TuneCandidate, ...]:
    """All combinations of a model and a setting."""
    several = len(models) > 1
    return tuple(
        TuneCandidate(
            " ".join(filter(None, (model if several or not one else "", text_of(one) if one or not several else ""))),
            one,
            model,
            trains,
        )
        for model in models
        for one in settings
    )


def cohort_of(given: Prepared, models: dict[str, Tensor], registry: Registry) -> Cohort:
    job, clients = given.job, given.clients
    return Cohort(
        job,
        Engine(job, given.layout, given.how),
        lambda name: records_of(job, name, clients[name], job.seed),
        models,
        registry,
        job.seed,
    )


def registry_of(job: Job, ledger: str | None) -> Registry:
    """The registry of a population: next to its privacy ledger or, if none is named, one per job in the folder `runs`."""
    assert job.origin is not None, "a command's job is from a file"
    return Registry(
        Path(f"{ledger}.asked") if ledger is not None else Path("runs") / f"{Path(job.origin.file).stem}.asked"
    )


def draw_devices(given: Prepared, count: int | None) -> tuple[str, ...]:
    """Draw `count` devices by the seed, or take all."""
    there = given.population.count
    if count is not None and count > there:
        raise Mistake(
            f"--per-round {count} with {there} clients: every device is asked at most once; give {there} or fewer"
        )
    drawn = torch.randperm(there, generator=generator_of(given.job.seed, "asked"))[: count or there]
    return tuple(map(given.population.name, drawn.tolist()))


def task_of(
    kind: str, job: Job, candidates: Sequence[TuneCandidate], models: dict[str, Tensor], least: int, **parameters: Any
) -> FederatedTask:
    assert job.origin is not None, "a command's job is from a file"
    named = tuple(Attachment(name, "", "", row.numel() * row.element_size()) for name, row in models.items())
    return FederatedTask(
        kind,
        code_of(job.origin.file, dict(job.origin.flags)),
        named,
        tuple(candidates),
        goal=job.goal,
        seed=job.seed,
        least=least,
        parameters=parameters,
    )


def keep_comparison(run: str, found: Comparison) -> None:
    """Save a comparison in the folder of its run, where the run's page shows it."""
    folder = Folder(Path(run))
    title = f"{found.b} against {found.a}, {found.when} training"
    rows = tuple(
        ABRow(one.metric, one.group, one.a, one.b, one.percent, one.low, one.high, min(one.devices), one.verdict)
        for one in found.changes
    )
    before = (one for one in comparisons_in(folder) if one.title != title)
    folder.write(COMPARISONS, finite_json(to_json(ABTables((*before, ABTable(title, rows))))))
