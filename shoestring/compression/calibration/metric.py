"""Evaluate the job's own metrics, with confidence intervals.

A metric that is a mean over samples (accuracy, cross entropy) is evaluated for each sample, from the outputs of its
batch, and its interval follows from the variance between samples. Other metrics (F1, area under a curve) have one value
per batch, and their interval follows from the variance between batches. Which of the two holds is tested on every
batch.
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

from shoestring.core.batch import Batch, map_leaves, rows_of, samples, split
from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.training.validation import LOSS, metrics_by_name

SAMPLES, BATCHES = "samples", "batches"
CONFIDENCE = 0.95
Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
SAME = 1e-4  # relative tolerance between the mean over samples and the value of the batch
Row = tuple[float, float]  # weight and value


@dataclass(frozen=True)
class MetricValue:
    value: float
    count: int  # number of samples or batches it is a mean of; 0: unknown
    unit: str = ""  # SAMPLES or BATCHES
    standard_error: float | None = None
    interval: tuple[float, float] | None = None  # 95 % confidence interval
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
        return f"{self.value:.4g} ({CONFIDENCE:.0%}: {self.interval[0]:.4g} to {self.interval[1]:.4g}, n = {self.count:,} {self.unit})"


@dataclass(frozen=True)
class Floor:
    """A bound that a metric must keep: accuracy>=0.91, or perplexity<=20."""

    name: str
    least: bool
    value: float

    def keeps(self, found: float) -> bool:
        return found >= self.value if self.least else found <= self.value

    def keeps_surely(self, found: MetricValue, margin: float) -> bool:
        """Whether the bound is kept with `margin` standard errors to spare."""
        spare = margin * (found.standard_error or 0.0)
        return self.keeps(found.value - spare if self.least else found.value + spare)

    def undecided_note(self, found: MetricValue) -> str:
        """Note for the user if the bound lies inside the confidence interval; else empty."""
        if found.interval is None or self.keeps(found.interval[0]) == self.keeps(found.interval[1]):
            return ""
        return f"too few {found.unit} to tell it from {self.value:g}"

    def __str__(self) -> str:
        return f"{self.name}{'>=' if self.least else '<='}{self.value:g}"


def parse_floor(written: str) -> Floor:
    """
    >>> parse_floor("accuracy>=0.91")
    Floor(name='accuracy', least=True, value=0.91)
    """
    found = re.fullmatch(r"\s*([\w./ -]+?)\s*(>=|<=)\s*(-?(?:\d+\.?\d*|\.\d+)(?:e-?\d+)?)\s*", written)
    if found is None:
        raise Mistake(
            f"--metric {written}: give a metric of the job and its bound, such as 'accuracy>=0.91' or 'loss<=1.2'"
        )
    return Floor(found[1], found[2] == ">=", float(found[3]))


def metrics(
    job: Job, model: nn.Module, batches: Sequence[Batch], notes: list[str] | None = None
) -> dict[str, MetricValue]:
    """The loss and the job's metrics, or the results of the job's own `validate`. If there is no loss, the reason is
    added to `notes`."""
    with torch.no_grad():
        if job.validate is not None:
            return {
                name: MetricValue(value, 0) for name, value in metrics_by_name(job.validate(model), "validate").items()
            }
        return combine_batches([batch_metrics(job, job.forward(model, batch), batch, notes) for batch in batches])


Named = tuple[float, Mapping[str, float]]  # weight of a batch or of a sample, and its metrics
BatchMetrics = tuple[Named, list[Named]]  # of a batch, and of each of its samples (empty if they can't be separated)


def combine_batches(told: Sequence[BatchMetrics]) -> dict[str, MetricValue]:
    """Combine the metrics of all batches."""
    names = told[0][0][1] if told else ()
    return {name: combine_metric([(whole, each) for whole, each in told if name in whole[1]], name) for name in names}


def batch_metrics(job: Job, output: Any, batch: Batch, notes: list[str] | None) -> BatchMetrics:
    """Metrics of one batch and of its samples, from the batch's outputs."""
    whole = float(job.weight(batch)), named_metrics(job, output, batch, notes)
    try:
        count = samples(batch)
        alone = map_leaves(hide_scalar, output)
        each = [
            (
                float(job.weight(one)),
                named_metrics(
                    job, map_leaves(partial(rows_of, start=number, stop=number + 1, count=count), alone), one, []
                ),
            )
            for number, one in enumerate(split(batch, count))
        ]
    except Exception:  # the batch can't be split, or the metrics are not defined for single samples
        each = []
    return whole, each


def hide_scalar(leaf: Any) -> Any:
    """Replace a scalar output by NaN: it belongs to the whole batch (such as a loss computed by the model)."""
    return (
        torch.full_like(leaf, torch.nan)
        if isinstance(leaf, Tensor) and not leaf.dim() and leaf.is_floating_point()
        else leaf
    )


def named_metrics(job: Job, output: Any, batch: Batch, notes: list[str] | None) -> Mapping[str, float]:
    try:
        found: dict[str, Any] = {LOSS: job.loss(output, batch)}
    except Exception as error:  # data without labels: fidelity needs none
        found = {}
        if notes is not None and not notes:
            notes.append(
                f"the report has no loss: the job's loss fails on these batches ({type(error).__name__}: {error})"
            )
    return metrics_by_name(found | dict(job.metrics(output, batch) if job.metrics is not None else {}), "metrics")


def combine_metric(told: Sequence[BatchMetrics], name: str) -> MetricValue:
    """Combine one metric over all batches, by samples if it is a mean over samples."""
    batches = [(weight, found[name]) for (weight, found), _ in told]
    single = [[(weight, found.get(name, math.nan)) for weight, found in each] for _, each in told]
    alone = all(each and agrees(mean(each), value) for each, (_, value) in zip(single, batches, strict=True))
    return (
        mean_with_interval([row for each in single for row in each], SAMPLES)
        if alone
        else mean_with_interval(batches, BATCHES)
    )


def agrees(found: float, wanted: float) -> bool:
    return math.isfinite(found) and abs(found - wanted) <= SAME * max(abs(wanted), 1e-3)


def mean(rows: Sequence[Row]) -> float:
    whole = sum(weight for weight, _ in rows)
    return sum(weight * value for weight, value in rows) / whole if whole else math.nan


def mean_with_interval(rows: Sequence[Row], unit: str) -> MetricValue:
    """Weighted mean of rows, with its standard error and confidence interval.

    >>> found = mean_with_interval([(1, 0.0), (1, 1.0), (1, 1.0), (1, 1.0)], "samples")
    >>> found.value, found.count, [round(one, 2) for one in found.interval]
    (0.75, 4, [0.3, 0.95])
    """
    value, count = mean(rows), len(rows)
    if count < 2 or not math.isfinite(value):
        return MetricValue(value, count, unit, rows=tuple(rows))
    error = standard_error(rows)
    shares = {one for _, one in rows} <= {0.0, 1.0} and len({weight for weight, _ in rows}) == 1
    reach = student_t_quantile(count - 1) * error
    return MetricValue(
        value, count, unit, error, wilson(value, count) if shares else (value - reach, value + reach), tuple(rows)
    )


def standard_error(rows: Sequence[Row]) -> float:
    """Standard error of the weighted mean."""
    value, whole, count = mean(rows), sum(weight for weight, _ in rows), len(rows)
    return math.sqrt(sum((weight / whole) ** 2 * (one - value) ** 2 for weight, one in rows) * count / (count - 1))


def wilson(share: float, count: int) -> tuple[float, float]:
    """Confidence interval of a proportion. Wilson 1927, doi 10.1080/01621459.1927.10502953.

    >>> [round(one, 3) for one in wilson(1.0, 64)]
    [0.943, 1.0]
    """
    middle = (share + Z * Z / (2 * count)) / (1 + Z * Z / count)
    reach = Z / (1 + Z * Z / count) * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    return max(middle - reach, 0.0), min(middle + reach, 1.0)


def student_t_quantile(freedom: int) -> float:
    """Quantile of Student's t, by its expansion around the normal quantile (Abramowitz, Stegun 1964, 26.7.5).

    >>> round(student_t_quantile(10), 2), round(student_t_quantile(3), 1)
    (2.23, 3.2)
    """
    return (
        Z
        + (Z**3 + Z) / (4 * freedom)
        + (5 * Z**5 + 16 * Z**3 + 3 * Z) / (96 * freedom**2)
        + (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / (384 * freedom**3)
    )


def metric_after_change(everywhere: MetricValue, before: MetricValue, after: MetricValue) -> MetricValue:
    """Estimate a metric of the compressed model on all data, from the original's value there and the paired difference
    on a subset. Pairing samples removes the noise that both models share. If the values can't be paired, return
    `after`.
    """
    if (
        before.unit != after.unit
        or not before.unit
        or len(before.rows) != len(after.rows)
        or everywhere.unit != before.unit
    ):
        return after
    change = mean_with_interval(
        [(weight, now - was) for (weight, was), (_, now) in zip(before.rows, after.rows, strict=True)], after.unit
    )
    value = everywhere.value + change.value
    if change.standard_error is None or everywhere.standard_error is None:
        return MetricValue(value, after.count, after.unit)
    error = math.hypot(change.standard_error, everywhere.standard_error)
    reach = student_t_quantile(max(after.count - 1, 1)) * error
    return MetricValue(value, after.count, after.unit, change.standard_error, (value - reach, value + reach))
