"""The report of a compression: requested, predicted and measured values. report.json is its JSON; the page is drawn
from it.

Imports nothing heavy, because pages need it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shoestring.runs.reports.plan_summary import UsedTechnique


@dataclass(frozen=True)
class Amount:
    """Predicted and measured; None: unknown."""

    predicted: float | None = None
    measured: float | None = None

    @property
    def best_known(self) -> float | None:
        """The measured value, or else the predicted one."""
        return self.predicted if self.measured is None else self.measured


@dataclass(frozen=True)
class LatencyReport:
    """Latency of one answer, in milliseconds."""

    p50: Amount = Amount()
    p99: Amount = Amount()


@dataclass(frozen=True)
class OutputReport:
    """Fidelity of one output of the model."""

    name: str
    by: str = ""  # the measure by which it is compared,
    why: str = ""  # and the reason for it
    axis: int | None = None
    n: int = 0  # number of answers
    samples: int = 0
    standard_error: float | None = None
    predicted_standard_error: float | None = None
    mean: Amount = Amount()
    worst: Amount = Amount()


@dataclass(frozen=True)
class FidelityReport:
    by: str = ""  # the measure of the leading output
    output: str = ""  # its name
    n: int | None = None
    samples: int | None = None
    standard_error: float | None = None
    outputs: tuple[OutputReport, ...] = ()
    mean: Amount = Amount()
    worst: Amount = Amount()


@dataclass(frozen=True)
class MetricReport:
    """A metric of the job, for the original and for the compressed model."""

    original: float | None = None
    predicted: float | None = None
    predicted_standard_error: float | None = None
    measured: float | None = None
    n: int | None = None
    of: str = ""  # what is counted
    standard_error: float | None = None
    interval: tuple[float, float] | None = None  # 95 % confidence interval
    decided_by: str = ""  # the requested bound
    undecided: str = ""


@dataclass(frozen=True)
class PlainLatency:
    p50: float | None = None
    p99: float | None = None


@dataclass(frozen=True)
class PlainReport:
    """The original model."""

    size_bytes: float | None = None
    memory_bytes: float | None = None
    latency_ms: PlainLatency = PlainLatency()


@dataclass(frozen=True)
class LayerReport:
    """How a weight is stored."""

    name: str
    technique: str = ""
    form: str = ""
    bits: float | None = None
    bytes: int | None = None
    shape: tuple[int, ...] = ()
    damage: float | None = None  # None: unknown after healing


@dataclass(frozen=True)
class FrontierPoint:
    """A point of the frontier, by arithmetic."""

    size_bytes: float
    damage: float
    latency_ms: float | None = None


@dataclass(frozen=True)
class Healed:
    """The effect of healing on the batches that confirm plans."""

    seconds: float
    steps: int
    before: float  # fidelity
    after: float
    run: str = ""  # its run folder


@dataclass(frozen=True)
class OnnxReport:
    path: str
    bytes: int = 0
    tolerance: float | None = None
    largest_difference: float | None = None
    notes: tuple[str, ...] = ()
    fidelity: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class CompressReport:
    folder: str = ""
    size_bytes: Amount = Amount()
    memory_bytes: Amount = Amount()
    latency_ms: LatencyReport = LatencyReport()
    fidelity: FidelityReport = FidelityReport()
    metric: Mapping[str, MetricReport] = field(default_factory=dict)
    techniques: tuple[UsedTechnique, ...] | None = None
    plain: PlainReport = PlainReport()
    layers: tuple[LayerReport, ...] = ()
    frontier: tuple[FrontierPoint, ...] = ()
    exits: Mapping[str, Any] | None = None
    healed: Healed | None = None
    asked: Mapping[str, float | str] = field(default_factory=dict)  # limits by name, and the metric's bound
    missed: tuple[str, ...] = ()  # requested limits that were missed, as text
    notes: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    onnx: OnnxReport | None = None
