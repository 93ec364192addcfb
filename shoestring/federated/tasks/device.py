"""The device's side of a task: it trains and judges every candidate on its own records, and tells sums.

    question -> judge before, train, judge after, of every candidate -> told_by_device -> sums, a histogram's one count, telemetry

All that leaves a device comes out of `told_by_device`: no record, no weights, no text of an error.

Contract: All that leaves a device in a task comes out of one function (tests/federated/tasks/test_task.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from typing import Protocol

from torch import Tensor

from shoestring.core.codec import to_json
from shoestring.core.job import Job
from shoestring.federated.records import Records
from shoestring.federated.round import Objective, Sums
from shoestring.federated.seeds import seed_of
from shoestring.federated.tasks.aggregates import BYTES, EDGES, counted, moments
from shoestring.federated.tasks.settings import TuneCandidate
from shoestring.federated.tasks.totals import AFTER, BEFORE, JOINTLY, PAIRED, DeviceTotals, MetricSums, Telemetry

LARGEST = 1e100  # beyond it a square would not be finite
NOTHING_HELD_OUT = "holds nothing out"
NOT_FINITE = "no finite number"


class HasRows(Protocol):
    @property
    def rows(self) -> Tensor: ...  # (k, size): the weights of each device after its training


class DeviceEngine(Protocol):
    """Trains and judges several devices at once; cohort/ has it."""

    def judged(self, rows: Tensor, records: Sequence[Records]) -> tuple[Sums, ...]: ...
    def trained(
        self, start: Tensor, records: Sequence[Records], objective: Objective, seeds: Sequence[int]
    ) -> HasRows: ...


@dataclass(frozen=True)
class Question:
    """What devices are asked."""

    candidates: tuple[TuneCandidate, ...]
    edges: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # of histograms, by metric; others have EDGES
    pair: bool = False  # of two candidates: how much the second differs from the first, and nothing of one alone
    jointly: str = ""  # the one metric that is asked for, with products of all candidates: a tuning compares them all

    @cached_property
    def size(self) -> int:
        """Bytes of it that a device is given, beside models."""
        return len(json.dumps(to_json(self)))


@dataclass(frozen=True)
class Judged:
    """One candidate on one device, before the device's training and, if it trains, after."""

    before: Sums
    after: Sums | None = None

    def at(self, when: str) -> Sums | None:
        return self.before if when == BEFORE else self.after


def answers(
    question: Question,
    job: Job,
    engine: DeviceEngine,
    models: Mapping[str, Tensor],
    records: Sequence[Records],
    seed: int,
    clock: Callable[[], float],
) -> list[DeviceTotals]:
    """What each of several devices tells. All candidates meet the same batches, so that nothing but the candidate differs."""
    began = clock()
    untrained = {
        name: engine.judged(row.expand(len(records), -1), records)
        for name, row in models.items()
        if any(one.model == name for one in question.candidates)
    }
    seeds = [seed_of(seed, "batches", 0, one.name) for one in records]
    found: list[list[Judged]] = [[] for _ in records]
    for candidate in question.candidates:
        after: tuple[Sums | None, ...] = (None,) * len(records)
        if candidate.trains:
            start = models[candidate.model].expand(len(records), -1)
            rows = engine.trained(start, records, Objective(candidate.local(job.local)), seeds).rows
            after = engine.judged(rows, records)
        for place, own in enumerate(found):
            own.append(Judged(untrained[candidate.model][place], after[place]))
    seconds = (clock() - began) / max(len(records), 1)
    down = question.size + sum(row.numel() * row.element_size() for row in models.values())
    telemetry = Telemetry(1, 1, sum(one.trains for one in question.candidates), seconds, 0, down)
    return [told_by_device(question, own, telemetry) for own in found]


def told_by_device(question: Question, found: Sequence[Judged], telemetry: Telemetry) -> DeviceTotals:
    """All that leaves a device: of every metric the sums of `aggregates`, for one device.

    A candidate without a finite number for some metric (its training diverged) is counted in `failed`, and is in no sum. A device on
    which all candidates are like that tells an error, and nothing else.
    """
    if not any(one.before for one in found):
        return failure(NOTHING_HELD_OUT, telemetry)
    failed = tuple(
        int(any(diverged(*value) for when in (BEFORE, AFTER) for value in (one.at(when) or {}).values()))
        for one in found
    )
    if all(failed):
        return failure(NOT_FINITE, telemetry)
    entries = (
        paired(found)
        if question.pair
        else jointly(question.jointly, found, failed)
        if question.jointly
        else alone(question, found)
    )
    if not entries:
        return failure(f"no {question.jointly or 'metric'}", telemetry)
    up = BYTES * sum(entry.numbers for entry in entries)
    return DeviceTotals(
        tuple(entries),
        Telemetry(telemetry.asked, 1, telemetry.trainings, telemetry.seconds, up, telemetry.down),
        failed,
    )


def failure(kind: str, telemetry: Telemetry) -> DeviceTotals:
    return DeviceTotals(
        (), Telemetry(telemetry.asked, 0, telemetry.trainings, telemetry.seconds, 0, telemetry.down, ((kind, 1),))
    )


def diverged(total: float, weight: float) -> bool:
    return not (isfinite(total) and abs(total) < LARGEST and isfinite(weight) and weight < LARGEST ** (1 / 3))


def measured(sums: Sums | None) -> dict[str, tuple[float, float]]:
    """What counts of it: nothing where a metric is not finite, for then the others are not those of a model either."""
    if sums is None or any(diverged(*value) for value in sums.values()):
        return {}
    return {name: value for name, value in sums.items() if value[1] > 0}


def alone(question: Question, found: Sequence[Judged]) -> list[MetricSums]:
    """Every candidate by itself."""
    return [
        MetricSums(
            (number,),
            when,
            metric,
            moments(weight, [total]),
            counted(total / weight, question.edges.get(metric, EDGES)),
        )
        for number, one in enumerate(found)
        for when in (BEFORE, AFTER)
        for metric, (total, weight) in measured(one.at(when)).items()
    ]


def paired(found: Sequence[Judged]) -> list[MetricSums]:
    """The first candidate, and the difference of the second to it, which is taken here, where both are known. Both are judged by the same
    records; a metric that weighs them differently for the two can't be compared, and is left out."""
    first, second = found
    entries = []
    for when in (BEFORE, AFTER):
        a, b = measured(first.at(when)), measured(second.at(when))
        for metric in (name for name in a if name in b and a[name][1] == b[name][1]):
            (total, weight), other = a[metric], b[metric][0]
            entries.append(MetricSums((0, 1), when, metric, moments(weight, [total, other - total]), kind=PAIRED))
    return entries


def jointly(metric: str, found: Sequence[Judged], failed: Sequence[int]) -> list[MetricSums]:
    """All candidates at once, as they are judged at the end; one that failed counts as 0, and whoever reads the sums knows that it did."""
    last = [one.after if one.after is not None else one.before for one in found]
    values = [None if bad else measured(sums).get(metric) for bad, sums in zip(failed, last, strict=True)]
    weight = next((value[1] for value in values if value is not None), 0.0)
    if not weight:
        return []
    totals = [value[0] if value is not None else 0.0 for value in values]
    return [MetricSums(tuple(range(len(found))), AFTER, metric, moments(weight, totals), kind=JOINTLY)]
