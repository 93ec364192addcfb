"""One compression from beginning to end: look at the model, choose, pack, measure what came out, report."""
from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

from torch import nn

from shoestring.compression.edits import edited
from shoestring.compression.fidelity import MEASURES, Fidelity, fidelity, outputs
from shoestring.compression.manifest import MANIFEST, TENSORS
from shoestring.compression.metric import Floor, Metric, metrics
from shoestring.compression.pack import Packed, write_folder
from shoestring.compression.place import memory_of
from shoestring.compression.room import CompressOutcome, CompressPlan, plain_cost, planned
from shoestring.compression.scratch import trim
from shoestring.compression.source import Samples, Source, samples_of
from shoestring.compression.technique import CompressTechnique, ModelCost
from shoestring.compression.timing import Latency, latencies, one_sample
from shoestring.core import random_state
from shoestring.core.budget import Budget
from shoestring.core.errors import Mistake, OverBudget
from shoestring.core.exactness import Exactness
from shoestring.core.figures import Figures, Quantity, figures
from shoestring.core.technique import described

QUANTITIES = (Quantity("size_bytes", "size on disk", counted=True), Quantity("memory_bytes", "weights in memory", counted=True),
              Quantity("p50_seconds", "an answer, median", "seconds"), Quantity("p99_seconds", "an answer, 99 of 100", "seconds"),
              Quantity("damage", "damage (1 - fidelity)", "share"))
LEVELS = (1e-5, 0.3)    # damages between which a metric's floor is looked for
STEPS = 9               # of the bisection


@dataclass(frozen=True)
class Asked:
    budget: Budget
    floor: Floor | None = None
    use: tuple[str | CompressTechnique, ...] | None = None
    measure: str = "cosine"
    unseen: int = 1024

    def __post_init__(self) -> None:
        if self.measure not in MEASURES:
            raise Mistake(f"fidelity is measured as {' or '.join(MEASURES)}, not as {self.measure!r}")
        if not self.budget.limits() and self.floor is None and self.use is None:
            raise Mistake("nothing says how small or how fast: give --size 16MB, --latency 5ms or --keep 0.998 (or techniques by --use)")


@dataclass(frozen=True)
class Measured:
    """What came out, on samples that nothing was chosen by."""

    size: int
    memory: int
    latency: Latency
    fidelity: Fidelity
    metrics: Mapping[str, Metric]
    original: Mapping[str, Metric]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Session:
    source: Source
    asked: Asked
    given: Samples
    outcome: CompressOutcome
    plain_latency: Latency
    healed: Any = None          # what healing did, if it was asked for

    @property
    def plan(self) -> CompressPlan:
        return self.outcome.chosen

    def packed(self, target: Path) -> Measured:
        """Write the folder, load it back, and measure what was loaded."""
        plan, job = self.plan, self.source.job
        made = plan.made()
        size = write_folder(target, plan.cost.about, plan.cost.specs(plan.allocation), made.forms, plan.cost.buffers, self.job_copy())
        loaded = self.loaded(target, made.model)
        wanted = outputs(self.source.model, job.forward, self.given.unseen)
        found = outputs(loaded, job.forward, self.given.unseen)
        mine, plain = latencies([loaded, self.source.model], job.forward, one_sample(self.given.unseen[0]))
        busy = (f"{mine.warning}; the plain model took {1e3 * plain.p50:.3g} ms in turns with it",) if mine.warning else ()
        notes: list[str] = []
        return Measured(size, memory_of(loaded), mine,
                        fidelity(found, wanted, self.asked.measure), metrics(job, loaded, self.given.unseen, notes),
                        metrics(job, self.source.model, self.given.unseen), (*busy, *notes))

    def loaded(self, target: Path, made: nn.Module) -> nn.Module:
        """The folder as a user will load it; it must answer as the model in memory does, to the bit."""
        loaded = self.loaded_model(target)
        sample = self.given.unseen[:1]
        if not all(bool((one == other).all()) for one, other in zip(outputs(loaded, self.source.job.forward, sample),
                                                                     outputs(made, self.source.job.forward, sample), strict=True)):
            raise Mistake(f"the model that was written to {target} answers otherwise than the one in memory: it has state that is neither "
                          f"a weight nor a buffer (or its factory draws numbers); keep such tensors in buffers")
        return loaded

    def loaded_model(self, target: Path) -> nn.Module:
        packed = Packed(target)
        trim()   # before a whole model is made
        with random_state.kept():
            return packed.fill(edited(self.source.job.model(), packed.about["edits"]))

    def job_copy(self) -> dict[str, bytes]:
        origin = self.source.job.origin
        return {"job.py": Path(origin.file).read_bytes()} if origin is not None else {}

    def missed(self, measured: Measured) -> list[str]:
        """What was asked for and does not hold of what came out, in words. Latency is told by the same percentile that was asked for."""
        budget = self.asked.budget
        tail = measured.latency.p99 if budget.percentile > 0.5 else measured.latency.p50
        doubt = f" ({measured.latency.warning})" if measured.latency.warning else ""
        found = [f"measured on unseen data, {one}{doubt if one.limit.name == 'latency' else ''}" for one in budget.broken({
            "size_bytes": measured.size, "latency_seconds": tail, "quality": measured.fidelity.mean})]
        floor = self.asked.floor
        if floor is not None and not floor.keeps(measured.metrics[floor.name].value):
            found.append(f"measured on unseen data, {floor.name} is {measured.metrics[floor.name].value:.4g}, and {floor} was asked for")
        return found

    # Telling

    def figures(self, measured: Measured | None = None) -> Figures:
        known, tail = self.plan.cost.known, self.plan.cost.clock.tail(0.99)
        median = known["median_seconds"]
        predicted: dict[str, float | None] = {**known, "p50_seconds": median, "p99_seconds": median * tail}
        if self.healed is not None:   # what training will do is not predicted
            predicted["damage"] = None
        told = figures(QUANTITIES, predicted)
        if measured is None:
            return told
        return told.measured({"size_bytes": measured.size, "memory_bytes": measured.memory, "p50_seconds": measured.latency.p50,
                              "p99_seconds": measured.latency.p99, "damage": measured.fidelity.damage})

    def report(self, measured: Measured, folder: Path) -> dict[str, Any]:
        """Everything, as `compress --json` prints it."""
        told = self.figures(measured)

        def both(name: str, times: float = 1.0) -> dict[str, float | None]:
            one = told[name]
            return {"predicted": None if one.predicted is None else one.predicted * times,
                    "measured": None if one.measured is None else one.measured * times}

        return {"folder": str(folder), "size_bytes": both("size_bytes"), "memory_bytes": both("memory_bytes"),
                "latency_ms": {"p50": both("p50_seconds", 1e3), "p99": both("p99_seconds", 1e3)},
                "fidelity": {"by": self.asked.measure, "n": measured.fidelity.count,
                             "mean": {"predicted": None if (lost := told["damage"].predicted) is None else 1 - lost,
                                      "measured": measured.fidelity.mean},
                             "worst": {"predicted": None if self.plan.checked is None or self.healed else self.plan.checked.worst,
                                       "measured": measured.fidelity.worst}},
                "metric": {name: {"predicted": number(measured.original[name].value), "measured": number(one.value), "n": one.count,
                                  "standard_error": one.standard_error} for name, one in measured.metrics.items()},
                "techniques": [described(one) | {"why": one.why} for one in self.plan.techniques],
                "plain": {"size_bytes": self.outcome.plain.numbers()["size_bytes"],
                          "memory_bytes": self.outcome.plain.cost.known["memory_bytes"], "latency_ms": {"p50": 1e3 * self.plain_latency.p50,
                          "p99": 1e3 * self.plain_latency.p99}},
                "layers": self.plan.layers(), "frontier": self.plan.cost.frontier(),
                **({"healed": self.healed.as_json()} if self.healed is not None else {}),
                "asked": {one.name: one.value for one in self.asked.budget.limits()}
                         | ({"metric": str(self.asked.floor)} if self.asked.floor is not None else {}),
                "missed": self.missed(measured),
                "notes": [*self.source.notes, *self.given.notes, *self.plan.cost.study.notes, *measured.notes],
                "files": [TENSORS, MANIFEST]}


def number(value: float) -> float | None:
    return value if isfinite(value) else None


def begun(source: Source, asked: Asked, cost: ModelCost | None = None, given: Samples | None = None) -> Session:
    """Look at a model and choose how to compress it. Raises OverBudget if nothing keeps the budget."""
    given = given or samples_of(source.job, asked.unseen)
    cost = replace(cost, wanted=asked.budget) if cost is not None else plain_cost(source, given, asked.budget, asked.measure)
    outcome = planned(cost, source.model, given.checked, asked.use) if asked.floor is None else for_metric(source, asked, given, cost)
    return Session(source, asked, given, outcome, cost.clock.plain)


def nearest_session(source: Source, asked: Asked, error: OverBudget) -> Session | None:
    """The session of the plan that came nearest, if all it lacks is fidelity."""
    plan = error.nearest
    if not isinstance(plan, CompressPlan) or any(one.limit.name != "quality" for one in asked.budget.broken(plan.numbers())):
        return None
    given = samples_of(source.job, asked.unseen)
    cost = plain_cost(source, given, Budget(), asked.measure)
    plain = CompressPlan((), Exactness.BITS, cost.known, cost, cost.study)
    return Session(source, asked, given, CompressOutcome(plan, plain, None), cost.clock.plain)


def for_metric(source: Source, asked: Asked, given: Samples, cost: ModelCost) -> CompressOutcome:
    """The smallest model whose metric, on the batches for confirming, is what it must be; with a size, the best within it."""
    wanted = asked.floor
    assert wanted is not None, "who asks has one"
    there = metrics(source.job, source.model, given.checked)
    if wanted.name not in there:
        raise Mistake(f"--metric {wanted}: the job measures {', '.join(there) or 'nothing'}; name one of them, or give the Job "
                      f"metrics=...")

    def tried(budget: Budget) -> tuple[CompressOutcome, float]:
        found = planned(replace(cost, wanted=budget), source.model, given.checked, asked.use)
        small = found.chosen.made().model
        return found, metrics(source.job, small, given.checked)[wanted.name].value

    if asked.budget.size is not None or asked.use is not None or asked.budget.quality is not None:
        found, value = tried(asked.budget)
        if not wanted.keeps(value):
            raise OverBudget(f"{found.chosen} keeps the rest of the budget and gives {wanted.name} {value:.4g}, where {wanted} is asked "
                             f"for (the original: {there[wanted.name].value:.4g}); allow more bytes, or --heal 10m", found.chosen)
        return found
    low, high = LEVELS
    best: CompressOutcome | None = None
    last: CompressOutcome | None = None
    value = 0.0
    for step in range(STEPS):
        level = low if not step else (low * high) ** 0.5
        last, value = tried(replace(asked.budget, quality=1 - level))
        if wanted.keeps(value):
            best, low = last, level
        elif best is None:
            raise OverBudget(f"the original gives {wanted.name} {there[wanted.name].value:.4g}, and {wanted} is asked for: no smaller "
                             f"model keeps that (nearest: {value:.4g})", last.chosen)
        else:
            high = level
    assert best is not None, "the first one was, or it was refused"
    return best


def written_report(report: Mapping[str, Any]) -> bytes:
    return json.dumps(report, indent=1).encode()
