"""Runs a task on devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shoestring.core.errors import Mistake
from shoestring.federated.tasks.compare import Comparison, compare
from shoestring.federated.tasks.evaluate import Evaluation, evaluate
from shoestring.federated.tasks.gather import Cohort
from shoestring.federated.tasks.task import FederatedTask
from shoestring.federated.tasks.tune import Tuning, tune


def perform_task(task: FederatedTask, cohort: Cohort, names: Sequence[str]) -> Evaluation | Tuning | Comparison:
    """Run a task on these devices. The result does not reveal any single device."""
    asked = replace(cohort, seed=task.seed, job=replace(cohort.job, goal=task.goal))
    switches = {name: bool(task.parameters[name]) for name in ("halving", "apart") if name in task.parameters}
    if task.kind == "evaluate":
        return evaluate(task.candidates, asked, names, task.least, task.edges)
    if task.kind == "tune":
        return tune(task.candidates, asked, names, task.by, task.least, switches.get("halving", False))
    if task.kind == "compare":
        a, b = task.candidates
        return compare(a, b, asked, names, task.by, task.least, switches.get("apart", False))
    raise Mistake("a task of the kind train needs rounds: use shoestring federate")
