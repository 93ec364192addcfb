"""The device's side of a task: it trains and evaluates every candidate on its own records, and sends sums.

    question -> for every candidate: evaluate, train, evaluate -> device_report -> sums, one count of a histogram, telemetry

Everything that leaves a device comes from `device_report`: no record, no weights, no error message.

Contract: Everything that leaves a device in a task comes from one function (tests/federated/tasks/test_task.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from typing import Protocol

from torch import Tensor

from shoestring.core.files.codec import to_json
from shoestring.core.job import Job
from shoestring.federated.devices.records import Records
from shoestring.federated.playing.seeds import seed_of
from shoestring.federated.round import Objective, Sums
from shoestring.federated.tasks.settings import TuneCandidate
from shoestring.federated.tasks.statistics.aggregates import BYTES, EDGES, device_moments, one_value_histogram
from shoestring.federated.tasks.statistics.totals import (
    AFTER,
    BEFORE,
    JOINTLY,
    PAIRED,
    DeviceTotals,
    MetricSums,
    Telemetry,
)

LARGEST = 1e100  # larger numbers count as diverged: their squares might overflow
NOTHING_HELD_OUT = "holds nothing out"
NOT_FINITE = "no finite number"


class HasRows(Protocol):
    @property
    def rows(self) -> Tensor: ...  # (k, size): the weights of each device after its training


class DeviceEngine(Protocol):
    """Trains and evaluates several devices at once; simulation/cohort/engine.py implements it."""

    def evaluate(self, rows: Tensor, records: Sequence[Records]) -> tuple[Sums, ...]: ...
    def train_weights(
        self, start: Tensor, records: Sequence[Records], objective: Objective, seeds: Sequence[int]
    ) -> HasRows: ...


@dataclass(frozen=True)
class Question:
    """What devices are asked: to evaluate these candidates, and which sums to send."""

    candidates: tuple[TuneCandidate, ...]
    edges: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # histogram edges by metric; default: EDGES
    pair: bool = False  # with two candidates: send only the first and the difference of the second to it
    jointly: str = ""  # for tuning: the only metric to send, with products of any two candidates

    @cached_property
    def size(self) -> int:
        """Bytes of the question sent to a device, without models."""
        return len(json.dumps(to_json(self)))


@dataclass(frozen=True)
class CandidateMetrics:
    """Metrics of one candidate on one device, before the device's training and, if it trains, after it."""

    before: Sums
    after: Sums | None = None

    def at(self, when: str) -> Sums | None:
        return self.before if when == BEFORE else self.after


def ask_devices(
    question: Question,
    job: Job,
    engine: DeviceEngine,
    models: Mapping[str, Tensor],
    records: Sequence[Records],
    seed: int,
    clock: Callable[[], float],
) -> list[DeviceTotals]:
    """The answers of several devices. All candidates train on the same batches, so only the candidate differs."""
    began = clock()
    untrained = {
        name: engine.evaluate(row.expand(len(records), -1), records)
        for name, row in models.items()
        if any(one.model == name for one in question.candidates)
    }
    seeds = [seed_of(seed, "batches", 0, one.name) for one in records]
    found: list[list[CandidateMetrics]] = [[] for _ in records]
    for candidate in question.candidates:
        after: tuple[Sums | None, ...] = (None,) * len(records)
        if candidate.trains:
            start = models[candidate.model].expand(len(records), -1)
            rows = engine.train_weights(start, records, Objective(candidate.local(job.local)), seeds).rows
            after = engine.evaluate(rows, records)
        for place, own in enumerate(found):
            own.append(CandidateMetrics(untrained[candidate.model][place], after[place]))
    seconds = (clock() - began) / max(len(records), 1)
    down = question.size + sum(row.numel() * row.element_size() for row in models.values())
    telemetry = Telemetry(1, 1, sum(one.trains for one in question.candidates), seconds, 0, down)
    return [device_report(question, own, telemetry) for own in found]


def device_report(question: Question, found: Sequence[CandidateMetrics], telemetry: Telemetry) -> DeviceTotals:
    """Everything that leaves a device: for every metric the sums of `aggregates`.

    A candidate with a non-finite metric (its training diverged) is counted in `failed` and left out of all sums. A
    device on which all candidates diverged reports an error and nothing else.
    """
    if not any(one.before for one in found):
        return failed_device(NOTHING_HELD_OUT, telemetry)
    failed = tuple(
        int(any(is_out_of_range(*value) for when in (BEFORE, AFTER) for value in (one.at(when) or {}).values()))
        for one in found
    )
    if all(failed):
        return failed_device(NOT_FINITE, telemetry)
    entries = (
        paired_entries(found)
        if question.pair
        else joint_entries(question.jointly, found, failed)
        if question.jointly
        else single_entries(question, found)
    )
    if not entries:
        return failed_device(f"no {question.jointly or 'metric'}", telemetry)
    up = BYTES * sum(entry.numbers for entry in entries)
    return DeviceTotals(
        tuple(entries),
        Telemetry(telemetry.asked, 1, telemetry.trainings, telemetry.seconds, up, telemetry.down),
        failed,
    )


def failed_device(kind: str, telemetry: Telemetry) -> DeviceTotals:
    return DeviceTotals(
        (), Telemetry(telemetry.asked, 0, telemetry.trainings, telemetry.seconds, 0, telemetry.down, ((kind, 1),))
    )


def is_out_of_range(total: float, weight: float) -> bool:
    return not (isfinite(total) and abs(total) < LARGEST and isfinite(weight) and weight < LARGEST ** (1 / 3))


def finite_sums(sums: Sums | None) -> dict[str, tuple[float, float]]:
    """The metrics with a weight above 0; none at all if one is not finite, because then the model is useless."""
    if sums is None or any(is_out_of_range(*value) for value in sums.values()):
        return {}
    return {name: value for name, value in sums.items() if value[1] > 0}


def single_entries(question: Question, found: Sequence[CandidateMetrics]) -> list[MetricSums]:
    """Sums of every candidate by itself."""
    return [
        MetricSums(
            (number,),
            when,
            metric,
            device_moments(weight, [total]),
            one_value_histogram(total / weight, question.edges.get(metric, EDGES)),
        )
        for number, one in enumerate(found)
        for when in (BEFORE, AFTER)
        for metric, (total, weight) in finite_sums(one.at(when)).items()
    ]


def paired_entries(found: Sequence[CandidateMetrics]) -> list[MetricSums]:
    """Sums of the first candidate and of the second one's difference to it, per metric.

    Both are evaluated on the same records. A metric with different weights for the two can't be compared and is left
    out.
    """
    first, second = found
    entries = []
    for when in (BEFORE, AFTER):
        a, b = finite_sums(first.at(when)), finite_sums(second.at(when))
        for metric in (name for name in a if name in b and a[name][1] == b[name][1]):
            (total, weight), other = a[metric], b[metric][0]
            entries.append(
                MetricSums((0, 1), when, metric, device_moments(weight, [total, other - total]), kind=PAIRED)
            )
    return entries


def joint_entries(metric: str, found: Sequence[CandidateMetrics], failed: Sequence[int]) -> list[MetricSums]:
    """Sums of all candidates' final metrics in one entry. A candidate that failed counts as 0; `failed` says so."""
    last = [one.after if one.after is not None else one.before for one in found]
    values = [None if bad else finite_sums(sums).get(metric) for bad, sums in zip(failed, last, strict=True)]
    weight = next((value[1] for value in values if value is not None), 0.0)
    if not weight:
        return []
    totals = [value[0] if value is not None else 0.0 for value in values]
    return [MetricSums(tuple(range(len(found))), AFTER, metric, device_moments(weight, totals), kind=JOINTLY)]
