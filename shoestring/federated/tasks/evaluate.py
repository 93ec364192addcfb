"""Federated evaluation: how good candidates are on the private records of devices, before and after each device trained them itself.

Every device measures all candidates on the records that it holds out, and tells sums (`device`). Of every candidate and metric the
developer sees the mean over samples and over devices, their standard errors, and a histogram of the devices' values; the same for each
group that the job declares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

import numpy as np

from shoestring.core.codec import Json, to_json
from shoestring.core.errors import Mistake
from shoestring.core.suggest import did_you_mean
from shoestring.federated.tasks.aggregates import Histogram
from shoestring.federated.tasks.device import Question
from shoestring.federated.tasks.estimates import WEIGHINGS
from shoestring.federated.tasks.gather import Cohort, seen_of
from shoestring.federated.tasks.release import LEAST, Released
from shoestring.federated.tasks.settings import TuneCandidate
from shoestring.federated.tasks.totals import ALONE, MetricSums, Telemetry

ALL = ""  # the group of all devices


@dataclass(frozen=True)
class Estimate:
    mean: float
    error: float  # standard error, between devices


@dataclass(frozen=True)
class MeasuredMetric:
    """One metric of one candidate, of all devices or of a group."""

    candidate: str
    when: str  # BEFORE or AFTER the device's own training
    metric: str
    group: str  # ALL, or a group's name
    devices: int
    by_device: Estimate
    by_sample: Estimate | None  # None: withheld
    histogram: Histogram | None = None  # of devices; None: they are too few for two bins


@dataclass(frozen=True)
class Evaluation:
    candidates: tuple[TuneCandidate, ...]
    measured: tuple[MeasuredMetric, ...]
    telemetry: Telemetry
    least: int  # devices that anything is told about
    seen: Released = field(repr=False)  # the sums that it was made of; they are not written
    failed: Mapping[str, int] = field(default_factory=dict)  # candidate -> devices on which it gave no finite number
    withheld: tuple[str, ...] = ()

    def numbered(self, candidate: str) -> int:
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
                f"nothing was measured of {metric!r} {when} training, of the candidate {candidate!r}"
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
    """The candidates on the devices of these names."""
    question = Question(tuple(candidates), edges or {})
    return evaluation(question, seen_of(question, cohort, names, least))


def evaluation(question: Question, seen: Released) -> Evaluation:
    """What is seen, as means and standard errors."""
    labels = [one.name for one in question.candidates]
    found = [
        measured(entry, labels, group)
        for group, totals in ((ALL, seen.whole), *seen.groups.items())
        for entry in totals.entries
        if entry.kind == ALONE
    ]
    found.sort(
        key=lambda one: (one.metric, labels.index(one.candidate))
    )  # stable: groups and before, after as they came
    return Evaluation(
        question.candidates, tuple(found), seen.whole.telemetry, seen.least, seen, failures(labels, seen), seen.withheld
    )


def measured(entry: MetricSums, labels: Sequence[str], group: str) -> MeasuredMetric:
    own, every = (estimate(entry, by) for by in ("devices", "samples"))
    assert own is not None, "means over devices are never withheld"
    return MeasuredMetric(
        labels[entry.about[0]], entry.when, entry.metric, group, entry.moments.devices, own, every, entry.histogram
    )


def estimate(entry: MetricSums, by: str) -> Estimate | None:
    found = WEIGHINGS[by](np.asarray(entry.moments.sums), entry.moments.columns)
    mean, error = float(found.mean[0]), float(np.sqrt(found.cov[0, 0]))
    return Estimate(mean, error) if isfinite(mean) and isfinite(error) else None


def failures(labels: Sequence[str], seen: Released) -> dict[str, int]:
    """Candidates that failed somewhere, and on how many devices."""
    return {name: count for name, count in zip(labels, seen.whole.failed, strict=False) if count}
