"""The job's own metric of a model, with how many samples it is a mean of, and an interval.

A metric that is a mean over samples (an accuracy, a cross entropy) is measured of every sample alone, from the outputs of its batch, and
its interval follows from how samples differ. Others (an F1, an area under a curve) have one value a batch, and their interval follows from
how batches differ. Whether it is a mean over samples is tried on every batch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.core.batch import Batch, mapped, rows_of, samples, split
from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.training.validation import LOSS, metrics_by_name

SAMPLES, BATCHES = "samples", "batches"
SURE = 0.95  # of an interval
Z = NormalDist().inv_cdf((1 + SURE) / 2)
SAME = 1e-4  # a mean over samples may differ from the batch's value by so much, relative
Row = tuple[float, float]  # weight and value


@dataclass(frozen=True)
class MetricValue:
    value: float
    count: int  # samples, or batches, that it is a mean of; 0: the job does not tell
    unit: str = ""  # which of the two
    standard_error: float | None = None
    interval: tuple[float, float] | None = None  # that holds the value of all data in 95 of 100 cases
    rows: tuple[Row, ...] = field(default=(), repr=False, compare=False)

    def as_json(self) -> dict[str, Any]:
        return {
            "n": self.count,
            "of": self.unit,
            "standard_error": self.standard_error,
            "interval": None if self.interval is None else list(self.interval),
        }

    def __str__(self) -> str:
        if self.interval is None:
            return f"{self.value:.4g}"
        return f"{self.value:.4g} ({SURE:.0%}: {self.interval[0]:.4g} to {self.interval[1]:.4g}, n = {self.count:,} {self.unit})"


@dataclass(frozen=True)
class Floor:
    """What a metric must be: accuracy>=0.91, or perplexity<=20."""

    name: str
    least: bool
    value: float

    def keeps(self, found: float) -> bool:
        return found >= self.value if self.least else found <= self.value

    def keeps_surely(self, found: MetricValue, margin: float) -> bool:
        """Whether it is kept with so many standard errors to spare."""
        spare = margin * (found.standard_error or 0.0)
        return self.keeps(found.value - spare if self.least else found.value + spare)

    def undecided(self, found: MetricValue) -> str:
        """What to say where the interval has values on both sides of the floor; empty if it has not."""
        if found.interval is None or self.keeps(found.interval[0]) == self.keeps(found.interval[1]):
            return ""
        return f"too few {found.unit} to tell it from {self.value:g}"

    def __str__(self) -> str:
        return f"{self.name}{'>=' if self.least else '<='}{self.value:g}"


def floor(written: str) -> Floor:
    """
    >>> floor("accuracy>=0.91")
    Floor(name='accuracy', least=True, value=0.91)
    """
    found = re.fullmatch(r"\s*([\w./ -]+?)\s*(>=|<=)\s*(-?[0-9.]+(?:e-?\d+)?)\s*", written)
    if found is None:
        raise Mistake(
            f"--metric {written}: name a metric of the job and what it must be, such as 'accuracy>=0.91' or 'loss<=1.2'"
        )
    return Floor(found[1], found[2] == ">=", float(found[3]))


def metrics(
    job: Job, model: nn.Module, batches: Sequence[Batch], notes: list[str] | None = None
) -> dict[str, MetricValue]:
    """The loss and the job's metrics; where it validates by itself, what that gives. `notes` gets why there is no loss."""
    with torch.no_grad():
        if job.validate is not None:
            return {
                name: MetricValue(value, 0) for name, value in metrics_by_name(job.validate(model), "validate").items()
            }
        return of_batches([of_batch(job, job.forward(model, batch), batch, notes) for batch in batches])


Named = tuple[float, Mapping[str, float]]  # weight of a batch or of a sample, and its metrics
BatchMetrics = tuple[Named, list[Named]]  # of a batch, and of each of its samples; none where these can't be told


def of_batches(told: Sequence[BatchMetrics]) -> dict[str, MetricValue]:
    """Over all batches."""
    names = told[0][0][1] if told else ()
    return {name: united([(whole, each) for whole, each in told if name in whole[1]], name) for name in names}


def of_batch(job: Job, output: Any, batch: Batch, notes: list[str] | None) -> BatchMetrics:
    """From what the model said of it."""
    whole = float(job.weight(batch)), by_name(job, output, batch, notes)
    try:
        count = samples(batch)
        alone = mapped(without_means, output)
        each = [
            (
                float(job.weight(one)),
                by_name(job, mapped(partial(rows_of, start=number, stop=number + 1, count=count), alone), one, []),
            )
            for number, one in enumerate(split(batch, count))
        ]
    except Exception:  # a batch that can't be cut, or metrics that are not about single samples
        each = []
    return whole, each


def without_means(leaf: Any) -> Any:
    """A number that is one for the whole batch (a loss that the model brings) says nothing of a sample."""
    return (
        torch.full_like(leaf, torch.nan)
        if isinstance(leaf, Tensor) and not leaf.dim() and leaf.is_floating_point()
        else leaf
    )


def by_name(job: Job, output: Any, batch: Batch, notes: list[str] | None) -> Mapping[str, float]:
    try:
        found: dict[str, Any] = {LOSS: job.loss(output, batch)}
    except Exception as error:  # data without labels: fidelity needs none
        found = {}
        if notes is not None and not notes:
            notes.append(
                f"the job's loss is not in the report: it does not work on these batches ({type(error).__name__}: {error})"
            )
    return metrics_by_name(found | dict(job.metrics(output, batch) if job.metrics is not None else {}), "metrics")


def united(told: Sequence[BatchMetrics], name: str) -> MetricValue:
    """One metric over all batches."""
    batches = [(weight, found[name]) for (weight, found), _ in told]
    single = [[(weight, found.get(name, math.nan)) for weight, found in each] for _, each in told]
    alone = all(each and agrees(mean(each), value) for each, (_, value) in zip(single, batches, strict=True))
    return of_rows([row for each in single for row in each], SAMPLES) if alone else of_rows(batches, BATCHES)


def agrees(found: float, wanted: float) -> bool:
    return math.isfinite(found) and abs(found - wanted) <= SAME * max(abs(wanted), 1e-3)


def mean(rows: Sequence[Row]) -> float:
    whole = sum(weight for weight, _ in rows)
    return sum(weight * value for weight, value in rows) / whole if whole else math.nan


def of_rows(rows: Sequence[Row], unit: str) -> MetricValue:
    """
    >>> found = of_rows([(1, 0.0), (1, 1.0), (1, 1.0), (1, 1.0)], "samples")
    >>> found.value, found.count, [round(one, 2) for one in found.interval]
    (0.75, 4, [0.3, 0.95])
    """
    value, count = mean(rows), len(rows)
    if count < 2 or not math.isfinite(value):
        return MetricValue(value, count, unit, rows=tuple(rows))
    error = standard_error(rows)
    shares = {one for _, one in rows} <= {0.0, 1.0} and len({weight for weight, _ in rows}) == 1
    reach = quantile(count - 1) * error
    return MetricValue(
        value, count, unit, error, wilson(value, count) if shares else (value - reach, value + reach), tuple(rows)
    )


def standard_error(rows: Sequence[Row]) -> float:
    """Of the weighted mean."""
    value, whole, count = mean(rows), sum(weight for weight, _ in rows), len(rows)
    return math.sqrt(sum((weight / whole) ** 2 * (one - value) ** 2 for weight, one in rows) * count / (count - 1))


def wilson(share: float, count: int) -> tuple[float, float]:
    """The interval of a share. Wilson 1927, doi 10.1080/01621459.1927.10502953.

    >>> [round(one, 3) for one in wilson(1.0, 64)]
    [0.943, 1.0]
    """
    middle = (share + Z * Z / (2 * count)) / (1 + Z * Z / count)
    reach = Z / (1 + Z * Z / count) * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    return max(middle - reach, 0.0), min(middle + reach, 1.0)


def quantile(freedom: int) -> float:
    """Of Student's t, by its expansion around the normal's (Abramowitz, Stegun 1964, 26.7.5).

    >>> round(quantile(10), 2), round(quantile(3), 1)
    (2.23, 3.2)
    """
    return (
        Z
        + (Z**3 + Z) / (4 * freedom)
        + (5 * Z**5 + 16 * Z**3 + 3 * Z) / (96 * freedom**2)
        + (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / (384 * freedom**3)
    )


def moved_by(everywhere: MetricValue, before: MetricValue, after: MetricValue) -> MetricValue:
    """A metric of a changed model on all data, from the original's there, and from both on some of them, sample by sample: what samples
    have in common is not noise. Where they can't be put side by side, the changed model's own."""
    if (
        before.unit != after.unit
        or not before.unit
        or len(before.rows) != len(after.rows)
        or everywhere.unit != before.unit
    ):
        return after
    change = of_rows(
        [(weight, now - was) for (weight, was), (_, now) in zip(before.rows, after.rows, strict=True)], after.unit
    )
    value = everywhere.value + change.value
    if change.standard_error is None or everywhere.standard_error is None:
        return MetricValue(value, after.count, after.unit)
    error = math.hypot(change.standard_error, everywhere.standard_error)
    reach = quantile(max(after.count - 1, 1)) * error
    return MetricValue(value, after.count, after.unit, change.standard_error, (value - reach, value + reach))
