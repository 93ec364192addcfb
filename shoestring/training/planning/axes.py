"""How a plan arranges its workers: which of them are alike, where the model is cut, and a sentence that says why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from math import prod

from shoestring.core.costs.ledger import Ledger
from shoestring.core.job import Job
from shoestring.core.units import bytes_text, seconds_text
from shoestring.core.workers.coordinates import coordinates
from shoestring.core.workers.mesh import on_one_axis
from shoestring.core.workers.staging import Staging
from shoestring.training.evidence.step import first_batch
from shoestring.training.group_technique import StagedTechnique
from shoestring.training.planning.plan import TrainingPlan
from shoestring.training.technique import TrainingTechnique


def explain_cut(plan: TrainingPlan, plain: TrainingPlan, memory: int) -> TrainingPlan:
    """The plan with the reason for its cut; `plain` has a whole replica on every worker, `memory` is a device's
    budget."""
    if plan.details.staging is None:
        return plan
    cut, sizes, simplest = plan.details.staging, plan.details.mesh, plain.predicted
    parts = "+".join(map(str, cut.cut))
    busy = [sum(work.end - work.begin for work in own) for own in cut.timeline]
    copies = f", in {sizes['data']} copies," if sizes["data"] > 1 else ""
    where = (
        f"{sum(cut.cut)} blocks are cut {parts} over {sizes['stage']} stages{copies} of which the slowest computes for "
        f"{seconds_text(max(busy))} of a step and the fastest for {seconds_text(min(busy))}"
    )
    waits = f"{cut.pieces} pieces of a batch by {cut.schedule} leave workers idle for {cut.bubble:.0%} of a step"
    if not plain.techniques:
        instead = "batches have too few samples for every worker to train a copy of its own"
    elif simplest["process_bytes"] > memory:
        instead = f"with a whole copy on every worker, {plain} needs {bytes_text(simplest['process_bytes'])} of {bytes_text(memory)}"
    else:
        instead = f"with a whole copy on every worker, {plain} takes {seconds_text(simplest['step_seconds'])} a step"
    return plan.with_details(staging=replace(cut, why=f"{where}; {waits}; {instead}"))


def kinds_of_workers(job: Job, sizes: Mapping[str, int], serves: bool) -> list[tuple[int, ...]]:
    """The ranks of a group by kind: workers with the same part of the model and equally large parts of batches are
    alike. A server is a kind of its own."""
    world = prod(sizes.values())
    if serves:
        return [(0,), tuple(range(1, world))]
    whole = first_batch(replace(job, mesh=on_one_axis()))
    counts = [job.count(part) for part in job.pieces(whole, sizes["data"])] if sizes["data"] > 1 else [0]
    kinds: dict[tuple[int, ...], list[int]] = {}
    for rank in range(world):
        place = coordinates(sizes, rank)
        held = tuple(number for axis, number in place.items() if axis != "data")
        kinds.setdefault((counts[place["data"]], *held), []).append(rank)
    return [tuple(ranks) for ranks in kinds.values()]


def staging(techniques: tuple[TrainingTechnique, ...], ledger: Ledger) -> Staging | None:
    """Where a plan cuts the model, on the ledger of the plain step; None if it does not."""
    costs = list(accumulate(techniques, lambda now, technique: technique.cost(now), initial=ledger))
    pairs = zip(techniques, costs, strict=False)
    return next((one.staging(now, costs[-1]) for one, now in pairs if isinstance(one, StagedTechnique)), None)
