"""Federated evaluation: how good candidates are on devices' held-out records, before and after each device trained
them.

Every device evaluates all candidates and sends sums (`device`). For every candidate and metric, the developer sees the
mean over samples and over devices, their standard errors, and a histogram of the devices' values, overall and for each
group that the job declares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

import numpy as np

from shoestring.core.command_line.suggest import did_you_mean
from shoestring.core.errors import Mistake
from shoestring.core.files.codec import Json, to_json
from shoestring.federated.tasks.device import Question
from shoestring.federated.tasks.gather import Cohort, ask_and_release
from shoestring.federated.tasks.privacy.release import LEAST, ReleasedTotals
from shoestring.federated.tasks.settings import TuneCandidate
from shoestring.federated.tasks.statistics.aggregates import Histogram
from shoestring.federated.tasks.statistics.estimates import WEIGHINGS
from shoestring.federated.tasks.statistics.totals import ALONE, MetricSums, Telemetry

ALL = ""  # the group of all devices


@dataclass(frozen=True)
class Estimate:
    mean: float
    error: float  # standard error between devices


@dataclass(frozen=True)
class MeasuredMetric:
    """One metric of one candidate, over all devices or over a group."""

    candidate: str
    when: str  # BEFORE or AFTER the device's own training
    metric: str
    group: str  # ALL, or a group's name
    devices: int
    by_device: Estimate
    by_sample: Estimate | None  # None: withheld
    histogram: Histogram | None = None  # of the devices' values; None: too few devices for two bins


@dataclass(frozen=True)
class Evaluation:
    candidates: tuple[TuneCandidate, ...]
    measured: tuple[MeasuredMetric, ...]
    telemetry: Telemetry
    least: int  # results are released for at least so many devices
    seen: ReleasedTotals = field(repr=False)  # the sums behind the result; not in its JSON
    failed: Mapping[str, int] = field(default_factory=dict)  # candidate -> devices on which a metric was not finite
    withheld: tuple[str, ...] = ()

    def number_of(self, candidate: str) -> int:
        known = [one.name for one in self.candidates]
        if candidate not in known:
            raise Mistake(
                f"no candidate is called {candidate!r}; there are {', '.join(known)}{did_you_mean(candidate, known)}"
            )
        return known.index(candidate)

    def one(self, candidate: str, metric: str, when: str, group: str = ALL) -> MeasuredMetric:
        wanted = (candidate, metric, when, group)
        found = next((one for one in self.measured if (one.candidate, one.metric, one.when, one.group) == wanted), None)
        if found is None:
            raise Mistake(
                f"there is no {metric!r} {when} training of the candidate {candidate!r}"
                f"{f' in the group {group!r}' if group else ''}"
            )
        return found

    def as_json(self) -> Json:
        return {
            name: to_json(getattr(self, name))
            for name in ("candidates", "measured", "telemetry", "least", "failed", "withheld")
        }


def evaluate(
    candidates: Sequence[TuneCandidate],
    cohort: Cohort,
    names: Sequence[str],
    least: int = LEAST,
    edges: Mapping[str, tuple[float, ...]] | None = None,
) -> Evaluation:
    """Evaluate candidates on these devices."""
    question = Question(tuple(candidates), edges or {})
    return evaluation_of(question, ask_and_release(question, cohort, names, least))


def evaluation_of(question: Question, seen: ReleasedTotals) -> Evaluation:
    """Turn released sums into means and standard errors."""
    labels = [one.name for one in question.candidates]
    found = [
        measured_metric(entry, labels, group)
        for group, totals in ((ALL, seen.whole), *seen.groups.items())
        for entry in totals.entries
        if entry.kind == ALONE
    ]
    found.sort(key=lambda one: (one.metric, labels.index(one.candidate)))  # stable: groups and moments keep their order
    return Evaluation(
        question.candidates, tuple(found), seen.whole.telemetry, seen.least, seen, failures(labels, seen), seen.withheld
    )


def measured_metric(entry: MetricSums, labels: Sequence[str], group: str) -> MeasuredMetric:
    own, every = (estimate(entry, by) for by in ("devices", "samples"))
    assert own is not None, "means over devices are never withheld"
    return MeasuredMetric(
        labels[entry.about[0]], entry.when, entry.metric, group, entry.moments.devices, own, every, entry.histogram
    )


def estimate(entry: MetricSums, by: str) -> Estimate | None:
    found = WEIGHINGS[by](np.asarray(entry.moments.sums), entry.moments.columns)
    mean, error = float(found.mean[0]), float(np.sqrt(found.cov[0, 0]))
    return Estimate(mean, error) if isfinite(mean) and isfinite(error) else None


def failures(labels: Sequence[str], seen: ReleasedTotals) -> dict[str, int]:
    """Candidates that failed on some device, with the number of such devices."""
    return {name: count for name, count in zip(labels, seen.whole.failed, strict=False) if count}
