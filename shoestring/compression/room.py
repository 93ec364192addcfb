"""The compression room: its catalogue and objective, and how candidates are confirmed by compressing the model."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import nn

from shoestring.compression.allocation.allocate import Allocation
from shoestring.compression.calibration.calibration import Calibration, perfect_fidelity
from shoestring.compression.calibration.fidelity import Fidelity, FidelitySums
from shoestring.compression.calibration.latency import Latency, latencies, one_sample
from shoestring.compression.calibration.output_kinds import AUTO, measures_of
from shoestring.compression.calibration.scratch import ScratchTensor, trim
from shoestring.compression.catalogue import CATALOGUE, clash
from shoestring.compression.formats.format import WeightFormat
from shoestring.compression.formats.manifest import numbers_bytes
from shoestring.compression.formats.packed_folder import buffers_of
from shoestring.compression.loading.source import CalibrationSamples, ModelSource
from shoestring.compression.technique import Compressed, CompressTechnique, ModelCost, StorageOffer
from shoestring.compression.techniques.decode import place_and_decode
from shoestring.compression.techniques.restructure import plain_offers
from shoestring.core.batch import Batch
from shoestring.core.budget import Budget
from shoestring.core.errors import Mistake
from shoestring.core.figures import Quantity
from shoestring.core.technique import applied, in_order, parse_technique
from shoestring.planning.choose import Chooser, best_or_asked, requested_candidate
from shoestring.planning.plan import Outcome, Plan
from shoestring.planning.room import Candidate, Room

DAMAGE = Quantity("damage", "damage", "share")
SIZE = Quantity("size_bytes", "size")
COLUMNS = (SIZE, Quantity("median_seconds", "an answer", "seconds"), DAMAGE)  # the columns of the table of plans
NONE: Mapping[str, WeightFormat] = {}
TRIES = 4  # allocations for a quality floor; each is corrected by the measured excess of the last one


@dataclass(frozen=True)
class CompressionDetails:
    """A compression's own part of its plan: how each weight is stored."""

    cost: ModelCost = field(repr=False, compare=False)
    first: Calibration = field(repr=False, compare=False)  # of the given model
    checked: Fidelity | None = field(default=None, compare=False)  # measured on batches that calibration did not see
    learned: Mapping[str, WeightFormat] = field(
        default_factory=dict, repr=False, compare=False
    )  # replaced by healing; None: as rounded

    @property
    def allocation(self) -> Allocation[StorageOffer]:
        return self.cost.allocation

    def layers(self) -> list[dict[str, Any]]:
        return [
            {
                "name": name,
                "technique": one.what.technique,
                "form": one.what.stored.kind,
                "bits": one.what.bits,
                "bytes": numbers_bytes(one.what.stored),
                "shape": list(one.what.stored.shape),
                "damage": None if self.learned else max(one.damages),
            }
            for name, one in self.allocation.items()
        ]

    def as_json(self) -> dict[str, Any]:
        return {"layers": self.layers(), "frontier": self.cost.frontier()}


CompressPlan = Plan[CompressTechnique, CompressionDetails]
CompressOutcome = Outcome[CompressPlan]


def compressed_model(plan: CompressPlan) -> Compressed:
    """A copy of the model, compressed as planned."""
    return compress_model(plan.techniques, plan.details.cost, plan.details.first, plan.details.learned)


class CompressRoom(Room[CompressTechnique, ModelCost, CompressPlan]):
    catalogue = CATALOGUE
    good: ClassVar[str] = "good"
    better: ClassVar[str] = "better"
    worse: ClassVar[str] = "worse"
    real: ClassVar[str] = "when the model is really compressed"
    phrases: ClassVar[Mapping[str, str]] = {
        "size_bytes": "{}",
        "latency_seconds": "{} an answer",
        "quality": "fidelity {}",
        "damage": "damage {}",
    }

    def __init__(
        self,
        cost: ModelCost,
        checked: Sequence[Batch],
        original: nn.Module,
        catalogue: Sequence[type[CompressTechnique]],
    ) -> None:
        budget, self.first = cost.wanted, cost.study
        self.objective = SIZE if budget.size is None and budget.quality is not None else DAMAGE
        self.budget, self.batches, self.original, self.catalogue = budget, checked, original, tuple(catalogue)
        self.wanted: list[dict[str, ScratchTensor]] | None = None  # the original's outputs
        self.timed: Latency | None = None  # the timing whose calls waited longest for a core

    def sketch(self, one: Candidate[CompressTechnique, ModelCost]) -> CompressPlan:
        return CompressPlan(one.techniques, one.exactness, one.known, CompressionDetails(one.cost, self.first))

    def confirm(self, one: Candidate[CompressTechnique, ModelCost]) -> CompressPlan:
        """Compress the model and compare it with the original. If a quality floor is kept by the sum of damages but not
        by the measurement, allocate again with damages scaled by the measured excess; the same for latency."""
        cost = one.cost
        for _ in range(TRIES):
            found, late = self.measure_candidate(one.techniques, cost)
            known = {**cost.known_figures, "quality": max(found.mean, 0.0), "damage": found.damage}
            if late is not None:
                median = cost.known_figures["median_seconds"] + late
                known |= {"median_seconds": median, "latency_seconds": median * cost.clock.tail(self.budget.percentile)}
            plan = CompressPlan(one.techniques, one.exactness, known, CompressionDetails(cost, self.first, found))
            broken = {excess.limit.name for excess in self.budget.broken_limits(known)}
            above = excess(cost, found)
            if "latency" in broken and late is not None and late > 0:
                cost = replace(cost, late=cost.late + late)
            elif "quality" in broken and self.budget.size is None and above > 0:
                cost = replace(cost, factor=cost.factor * max(1.02, above))
            else:
                return plan
        return plan

    def measure_candidate(
        self, techniques: Sequence[CompressTechnique], cost: ModelCost
    ) -> tuple[Fidelity, float | None]:
        """Measured fidelity; if there is a latency limit, also the seconds by which an answer exceeds the prediction."""
        study = cost.study
        if not techniques:  # the model unchanged
            return perfect_fidelity(study.measures), None
        if self.wanted is None:
            self.wanted = [
                {name: self.first.scratch.keep(one) for name, one in study.outputs([batch], self.original)[0].items()}
                for batch in self.batches
            ]
        made, comparison = compress_model(techniques, cost, self.first).model, FidelitySums(study.measures)
        errors = self.first.logit_errors()
        for batch, wanted in zip(self.batches, self.wanted, strict=True):
            found = study.outputs([batch], made)[0]
            trim()  # of the forward pass, before as much is read: outputs can be as large as the model
            original = {name: self.first.scratch.read(place) for name, place in wanted.items()}
            comparison.add(found, original)
            errors.add(found, original)
            del found, original
        if not comparison.finite and not self.budget.broken_limits(
            cost.known_figures
        ):  # otherwise it is only shown, as the nearest plan
            raise Mistake("the compressed model's outputs have numbers that are not finite: allow more bytes")
        fidelity = errors.expected(comparison.fidelity)
        if self.budget.latency is None:
            return fidelity, None
        mine, plain = latencies(
            [made, self.original], study.forward, study.sample
        )  # called alternately, because the machine's speed changes over time
        self.timed = mine if self.timed is None or mine.busy > self.timed.busy else self.timed
        return fidelity, mine.p50 / plain.p50 * self.first.clock.median - cost.known_figures["median_seconds"]

    def clash(self, one: CompressTechnique, other: CompressTechnique) -> str:
        return clash(one, other)

    def concerns(self, kind: type[CompressTechnique]) -> bool:
        return kind.seam == "storage"

    def hint(self) -> str:
        heal = (
            "; --heal 10m lets the small model learn from the original afterwards"
            if self.budget.quality is not None
            else ""
        )
        busy = self.load_warning() if self.budget.latency is not None else ""
        quieter = (f"{busy}: ask again when it is quieter",) if busy else ()
        return heal + "".join(f"; {one}" for one in (*self.first.left_plain, *quieter))

    def load_warning(self) -> str:
        timings = (one for one in (self.first.clock.plain, self.timed) if one is not None)
        return max(timings, key=lambda one: one.busy).warning


def excess(cost: ModelCost, found: Fidelity) -> float:
    """The factor by which the measured damage of the leading output exceeds the prediction; 0 if none was predicted."""
    leading = max(range(len(found.damages)), key=lambda place: found.damages[place])
    dead = cost.study.base.damages[leading]
    reckoned = cost.sums.damages(cost.allocation)[leading] - dead
    return (found.damages[leading] - dead) / reckoned if reckoned > 0 else 0.0


def plain_cost(
    source: ModelSource,
    given: CalibrationSamples,
    budget: Budget,
    measure: str = AUTO,
    wanted: Sequence[str] = (),
    axis: int | None = None,
) -> ModelCost:
    """The cost of the uncompressed model. `measure`, `wanted`, `axis`: how to compare which outputs, if the user says
    so."""
    measures, notes = measures_of(source.job, source.model, given.calibration, wanted, measure, axis)
    study = Calibration(
        source.model,
        source.job.forward,
        given.calibration,
        given.checked,
        measures,
        one_sample(given.unseen[0]),
        timed=source.file is None,
        notes=notes,
    )
    return ModelCost(study, budget, buffers_of(source.model), source.about, plain_offers(study))


def compress_model(
    techniques: Sequence[CompressTechnique],
    cost: ModelCost,
    first: Calibration,
    learned: Mapping[str, WeightFormat] = NONE,
) -> Compressed:
    """The calibrated model with these techniques applied: a copy."""
    forms = {name: one.what.way.form for name, one in cost.allocation.items() if one.what.technique == ""}
    own = {
        id(one): one for one in first.model.parameters()
    }  # formats replace these weights, so they need not be copied
    made = applied(techniques, Compressed(copy.deepcopy(first.model, own), first, cost.allocation, forms))
    return place_and_decode(replace(made, forms={**made.forms, **learned}))


def plan_compression(
    cost: ModelCost, original: nn.Module, checked: Sequence[Batch], use: Sequence[str | CompressTechnique] | None = None
) -> CompressOutcome:
    """The best plan within the budget, or exactly the requested techniques. Raises OverBudget with the nearest plan."""
    room = CompressRoom(cost, checked, original, CATALOGUE)
    plain = room.confirm(requested_candidate((), cost))
    techniques = None
    if use is not None:
        techniques = in_order(parse_technique(one, CATALOGUE) if isinstance(one, str) else one for one in use)
        cost = replace(cost, forced=True)
    return best_or_asked(Chooser(room, cost), cost.wanted, plain, techniques)
