"""Compression techniques: their subject is a model, and their cost is a `ModelCost`: bytes, latency, damage.

There are four kinds, applied in this order:

    structure   changes the model into a smaller ordinary one: fewer heads, neurons, layers; two thin matrices for a wide one
    zeros       sets weights to zero
    storage     offers formats for every weight; the allocator chooses one per weight
    running     how the packed model runs

So two storage techniques together give every weight more options, and storage after structure packs what is left.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, ClassVar, NamedTuple, Self

from torch import Tensor, nn

from shoestring.compression.allocation.allocate import Allocation, Option, frontier, smallest_bytes, total
from shoestring.compression.allocation.allocate_outputs import OutputSums
from shoestring.compression.calibration.calibration import Calibration
from shoestring.compression.calibration.latency import LatencyTimer
from shoestring.compression.calibration.storage_choice import StorageChoice
from shoestring.compression.calibration.weight_usage import Weight
from shoestring.compression.formats.format import WeightFormat
from shoestring.compression.formats.manifest import Stored, fixed_bytes, folder_bytes, numbers_bytes, stored_bytes
from shoestring.core.budget import Budget
from shoestring.core.technique import Technique

STRUCTURE, ZEROS, STORAGE, RUNNING = 10, 20, 30, 40  # values of `order`
COUNTS = 0.01  # fraction of the total damage from which on a weight's damage is measured instead of estimated
LEAST_SHARE = 0.05  # of the plain model's latency; parts that were timed on a busy machine may seem to save more
ROUNDS = 4  # allocations, each after measuring the damages that the last one relied on


@dataclass(frozen=True)
class StorageOffer:
    """A format offered for a weight."""

    technique: str  # the technique that offers it; empty: stored unchanged
    label: str  # its name in the calibration
    way: StorageChoice = field(repr=False)

    @property
    def stored(self) -> Stored:
        return self.way.stored

    @property
    def bits(self) -> float:
        return round(8 * numbers_bytes(self.stored) / max(prod(self.stored.shape), 1), 2)


def is_plain(stored: Stored) -> bool:
    """Whether it needs no computation before use."""
    return stored.kind == "plain" and not stored.settings.get("stored")


Options = Mapping[str, Sequence[Option[StorageOffer]]]  # for every weight


class AllocationChoice(NamedTuple):
    options: Options
    allocation: Allocation[StorageOffer]  # one for every weight


@dataclass(frozen=True)
class ModelCost:
    """The cost of a model under a budget, which determines the format of each weight."""

    study: Calibration
    wanted: Budget
    buffers: Mapping[str, Tensor]
    about: Mapping[str, Any] = field(default_factory=dict)  # the manifest's entries other than weights: job, edits
    offers: Mapping[str, tuple[StorageOffer, ...]] = field(default_factory=dict)
    decoded: bool = False  # weights are decoded when the model is loaded
    forced: bool = False  # the user named the techniques: whatever they can store must be stored so
    settled: frozenset[str] = frozenset()  # weights whose format the user determined
    factor: float = 1.0  # measured total damage / sum of single damages
    late: float = 0.0  # measured minus predicted latency, seconds
    bits: tuple[int, ...] = ()  # of the integers that the file to write has; empty: any
    notes: tuple[str, ...] = ()  # weights that storage techniques left alone, and why

    @property
    def clock(self) -> LatencyTimer:
        return self.study.clock

    @property
    def messages(self) -> tuple[str, ...]:
        """Messages for the user: weights that techniques left alone, and why."""
        return (*self.study.messages, *self.notes)

    def priced_options(self) -> Options:
        """The options of every weight, with bytes in the folder, damage (as far as known now) and seconds."""
        return {
            weight.name: [self.option(weight, offer) for offer in self.offers[weight.name]]
            for weight in self.study.weights
        }

    def option(self, weight: Weight, offer: StorageOffer) -> Option[StorageOffer]:
        dense, packed = weight.count * weight.dtype.itemsize, offer.stored
        damages = self.study.damage(weight, offer.label)
        return Option(
            offer,
            stored_bytes(packed),
            sum(damages),
            0.0 if self.wanted.latency is None else self.extra_seconds(packed),
            dense if self.decoded else numbers_bytes(packed),
            damages,
        )

    def extra_seconds(self, stored: Stored) -> float:
        """Seconds that a format adds to an answer. Without a limit on latency, only formats that a plan takes are timed."""
        untimed = self.decoded or is_plain(stored) or not self.study.timed
        return 0.0 if untimed else self.clock.decoding(stored)

    @property
    def sums(self) -> OutputSums:
        return OutputSums(self.study.base.damages, self.factor)

    @property
    def options(self) -> Options:
        """The options of every weight, with the damages used by the allocation."""
        return self.choice.options

    @property
    def allocation(self) -> Allocation[StorageOffer]:
        """The option of every weight: within the budget or, if that is impossible, nearest to it."""
        return self.choice.allocation

    @cached_property
    def choice(self) -> AllocationChoice:
        """Allocate, measure the damages that the allocation relies on, and allocate again with these."""
        found = AllocationChoice(options := self.priced_options(), self.best(options))
        for _ in range(ROUNDS if self.can_be_small(options) else 0):
            if not self.measure(found.allocation):
                break
            found = AllocationChoice(options := self.priced_options(), self.best(options))
        return found

    def can_be_small(self, options: Options) -> bool:
        """Whether the smallest formats keep the size limit. If not, the plan is only shown as the nearest, which needs
        no exact damages."""
        size = self.wanted.size
        return size is None or fixed_bytes(self.about, self.buffers) + smallest_bytes(options) <= size

    def best(self, options: Options) -> Allocation[StorageOffer]:
        budget = self.wanted
        fixed, sums = fixed_bytes(self.about, self.buffers), self.sums
        most = (budget.size - fixed) if budget.size is not None else float("inf")
        seconds = (
            float("inf")
            if budget.latency is None
            else (budget.latency / self.clock.tail(budget.percentile) - self.clock.median - self.late)
        )
        if budget.size is None and budget.quality is not None:
            found = sums.fewest(options, 1 - budget.quality, seconds)
            if found is not None:
                return found
        found = sums.least(options, most, seconds)
        smallest = smallest_bytes(options)
        if found is None and most < smallest:  # the nearest: the smallest, within the latency if possible
            found = sums.least(options, smallest, seconds) or sums.least(options, smallest)
        return found or {name: min(some, key=lambda one: (one.seconds, one.bytes)) for name, some in options.items()}

    def measure(self, allocation: Allocation[StorageOffer]) -> bool:
        """Measure the damages that an allocation relies on, if they are large enough; returns whether any was measured
        for the first time."""
        new, whole = False, OutputSums(self.study.nothing).damages(allocation)
        for weight in self.study.weights:
            taken = allocation[weight.name]
            counts = any(one > COUNTS * every for one, every in zip(taken.damages, whole, strict=True))
            if weight.is_matrix and counts and (weight.name, taken.what.label) not in self.study.damages:
                self.study.measure_damage(weight, taken.what.label)
                new = True
        return new

    def specs(self, allocation: Allocation[StorageOffer]) -> dict[str, Stored]:
        return {weight.name: allocation[weight.name].what.stored for weight in self.study.weights}

    def numbers(self) -> Mapping[str, float]:
        return dict(self.known_figures)

    @cached_property
    def known_figures(self) -> dict[str, float]:
        found = self.allocation
        damage = max(self.sums.damages(found))
        return {
            "size_bytes": folder_bytes(self.about, self.specs(found), self.buffers),
            "memory_bytes": sum(one.memory for one in found.values()),
            **(self.seconds(self.added_seconds(found)) if self.study.timed else {}),
            "quality": max(1 - damage, 0.0),
            "damage": damage,
        }

    def added_seconds(self, allocation: Allocation[StorageOffer]) -> float:
        return sum(self.extra_seconds(one.what.stored) for one in allocation.values())

    def seconds(self, extra: float) -> dict[str, float]:
        """Seconds of an answer, where packed weights take some more than plain ones, or less, but never all of it."""
        median = max(self.clock.median + extra + self.late, LEAST_SHARE * self.clock.median)
        return {"latency_seconds": median * self.clock.tail(self.wanted.percentile), "median_seconds": median}

    def frontier(self) -> list[dict[str, Any]]:
        """The frontier of size and damage, by arithmetic; with latencies if there is a limit on them."""
        timed = self.study.timed and self.wanted.latency is not None
        points: list[dict[str, Any]] = [
            {
                "size_bytes": folder_bytes(self.about, self.specs(one), self.buffers),
                "damage": max(self.sums.damages(one)),
                "latency_ms": 1000 * self.seconds(total(one)[2])["median_seconds"] if timed else None,
            }
            for one in frontier(self.options)
        ]
        return [
            one
            for number, one in enumerate(points)
            if all(one["damage"] < other["damage"] for other in points[:number])
        ]

    def with_offers(self, offers: Mapping[str, Sequence[StorageOffer]], only: bool) -> Self:
        """With more formats for some weights. `only`: the user requested them, so other formats of these weights are
        dropped."""

        def merge_offers(name: str, before: tuple[StorageOffer, ...]) -> tuple[StorageOffer, ...]:
            if name not in offers or (name in self.settled and not only):
                return before
            if only and name not in self.settled:
                return tuple(offers[name])
            return (*(one for one in before if one.technique or not self.forced), *offers[name])

        settled = self.settled | set(offers) if only else self.settled
        return replace(
            self, offers={name: merge_offers(name, some) for name, some in self.offers.items()}, settled=settled
        )


@dataclass(frozen=True)
class Compressed:
    """A model being compressed: its present modules, and the format chosen for each weight."""

    model: nn.Module
    study: Calibration
    allocation: Allocation[StorageOffer]
    forms: Mapping[str, WeightFormat] = field(default_factory=dict)
    edits: tuple[Mapping[str, Any], ...] = ()
    decoded: bool = False


class CompressTechnique(Technique[Compressed, ModelCost], ABC):
    """`seam`: structure, zeros, storage or running."""

    seam: ClassVar[str]
    exact: ClassVar[bool] = False


class Storage(CompressTechnique, ABC):
    """A technique that offers formats for weights; `labels` names them."""

    seam: ClassVar[str] = "storage"
    order: ClassVar[int] = STORAGE

    @abstractmethod
    def labels(self, cost: ModelCost, weight: Weight) -> Sequence[str]:
        """The formats that it offers for a weight, by their names in the calibration; empty if it can't store the
        weight."""

    def left_alone(self, cost: ModelCost, weight: Weight) -> str:
        """Why it can't store a weight, if known; empty if it can."""
        return ""

    def only(self, cost: ModelCost) -> bool:
        """Whether weights that it can store must be stored so: the user named a setting."""
        return False

    def refusal(self, cost: ModelCost, /) -> str:
        """Refuses a technique that the user named and that can't store a single weight: it would have no effect, and
        seem perfect."""
        if not cost.forced or any(self.labels(cost, weight) for weight in cost.study.storable):
            return ""
        why = self.reasons(cost)
        return "it can store no weight of this model" + (f": {'; '.join(why)}" if why else "")

    def reasons(self, cost: ModelCost) -> list[str]:
        """Why it leaves matrices alone: each reason once, with an example and the number of other weights."""
        found: dict[str, list[str]] = {}
        for weight in cost.study.storable:
            if weight.is_matrix and (why := self.left_alone(cost, weight)):
                found.setdefault(why, []).append(weight.name)
        return [f"{names[0]}{f' and {len(names) - 1} more' * (len(names) > 1)}: {why}" for why, names in found.items()]

    def cost(self, cost: ModelCost, /) -> ModelCost:
        name, ways = type(self).__name__, cost.study.ways
        found = {
            weight.name: [StorageOffer(name, label, ways[weight.name, label]) for label in labels]
            for weight in cost.study.storable
            if (labels := self.labels(cost, weight))
        }
        left = [f"{name} left {one}" for one in self.reasons(cost)] if cost.forced else []
        notes = (*cost.notes, *(one for one in left if one not in cost.notes))
        return replace(cost.with_offers(found, self.only(cost)), notes=notes)

    def apply(self, subject: Compressed, /) -> Compressed:
        mine = {
            name: one.what.way.form
            for name, one in subject.allocation.items()
            if one.what.technique == type(self).__name__
        }
        return replace(subject, forms={**subject.forms, **mine})
