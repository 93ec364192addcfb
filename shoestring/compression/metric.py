"""The job's own metric of a model, with how many samples it is a mean of and its standard error."""
from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoestring.core.batch import Batch
from shoestring.core.errors import Mistake
from shoestring.core.job import Job
from shoestring.validation import LOSS, named


@dataclass(frozen=True)
class Metric:
    value: float
    count: float                     # weight of the batches: samples, unless the job says otherwise; 0: the job does not tell
    standard_error: float | None     # of the mean, from what batches differ by; None: of one batch, or of the job's own validation

    def as_json(self) -> dict[str, Any]:
        return {"value": self.value, "n": self.count, "standard_error": self.standard_error}


@dataclass(frozen=True)
class Floor:
    """What a metric must be: accuracy>=0.91, or perplexity<=20."""

    name: str
    least: bool
    value: float

    def keeps(self, found: float) -> bool:
        return found >= self.value if self.least else found <= self.value

    def __str__(self) -> str:
        return f"{self.name}{'>=' if self.least else '<='}{self.value:g}"


def floor(written: str) -> Floor:
    """
    >>> floor("accuracy>=0.91")
    Floor(name='accuracy', least=True, value=0.91)
    """
    found = re.fullmatch(r"\s*([\w./ -]+?)\s*(>=|<=)\s*(-?[0-9.]+(?:e-?\d+)?)\s*", written)
    if found is None:
        raise Mistake(f"--metric {written}: name a metric of the job and what it must be, such as 'accuracy>=0.91' or 'loss<=1.2'")
    return Floor(found[1], found[2] == ">=", float(found[3]))


def metrics(job: Job, model: nn.Module, batches: Sequence[Batch], notes: list[str] | None = None) -> dict[str, Metric]:
    """The loss and the job's metrics; where it validates by itself, what that gives. `notes` gets why there is no loss."""
    with torch.no_grad():
        if job.validate is not None:
            return {name: Metric(value, 0, None) for name, value in named(job.validate(model), "validate").items()}
        rows = [(float(job.weight(batch)), by_name(job, model, batch, notes)) for batch in batches]
    return {name: mean([(weight, found[name]) for weight, found in rows if name in found]) for name in (rows[0][1] if rows else ())}


def by_name(job: Job, model: nn.Module, batch: Batch, notes: list[str] | None) -> Mapping[str, float]:
    output = job.forward(model, batch)
    try:
        found: dict[str, Any] = {LOSS: job.loss(output, batch)}
    except Exception as error:   # data without labels: fidelity needs none
        found = {}
        if notes is not None and not notes:
            notes.append(f"the job's loss is not in the report: it does not work on these batches ({type(error).__name__}: {error})")
    return named(found | dict(job.metrics(output, batch) if job.metrics is not None else {}), "metrics")


def mean(rows: Sequence[tuple[float, float]]) -> Metric:
    """
    >>> mean([(1, 0.0), (1, 1.0), (2, 0.5)])
    Metric(value=0.5, count=4, standard_error=0.21650635094610965)
    """
    whole = sum(weight for weight, _ in rows)
    value = sum(weight * one for weight, one in rows) / whole if whole else math.nan
    if len(rows) < 2:
        return Metric(value, whole, None)
    spread = sum((weight / whole) ** 2 * (one - value) ** 2 for weight, one in rows) * len(rows) / (len(rows) - 1)
    return Metric(value, whole, math.sqrt(spread))
