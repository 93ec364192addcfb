"""The report of a compression: what was asked for, predicted and measured. report.json is this as JSON; its page is drawn from this.

Nothing heavy is imported: pages need it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shoestring.runs.plan_summary import UsedTechnique


@dataclass(frozen=True)
class Amount:
    """Predicted beside measured; None: not known."""

    predicted: float | None = None
    measured: float | None = None

    @property
    def known(self) -> float | None:
        """What was measured; where nothing was, what was predicted."""
        return self.predicted if self.measured is None else self.measured


@dataclass(frozen=True)
class LatencyReport:
    """Milliseconds of an answer."""

    p50: Amount = Amount()
    p99: Amount = Amount()


@dataclass(frozen=True)
class OutputReport:
    """How close one output of the model is to the original's."""

    name: str
    by: str = ""  # how it is compared,
    why: str = ""  # and why so
    axis: int | None = None
    n: int = 0  # answers
    samples: int = 0
    standard_error: float | None = None
    predicted_standard_error: float | None = None
    mean: Amount = Amount()
    worst: Amount = Amount()


@dataclass(frozen=True)
class FidelityReport:
    by: str = ""  # how the output that leads is compared
    output: str = ""  # its name
    n: int | None = None
    samples: int | None = None
    standard_error: float | None = None
    outputs: tuple[OutputReport, ...] = ()
    mean: Amount = Amount()
    worst: Amount = Amount()


@dataclass(frozen=True)
class MetricReport:
    """A metric of the job, of the original and of the compressed model."""

    original: float | None = None
    predicted: float | None = None
    predicted_standard_error: float | None = None
    measured: float | None = None
    n: int | None = None
    of: str = ""  # what is counted
    standard_error: float | None = None
    interval: tuple[float, float] | None = None  # of 95 %
    decided_by: str = ""  # the floor that was asked for
    undecided: str = ""


@dataclass(frozen=True)
class PlainLatency:
    p50: float | None = None
    p99: float | None = None


@dataclass(frozen=True)
class PlainReport:
    """The original."""

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
    damage: float | None = None  # None: not known after healing


@dataclass(frozen=True)
class FrontierPoint:
    """What can be reached, by arithmetic."""

    size_bytes: float
    damage: float
    latency_ms: float | None = None


@dataclass(frozen=True)
class Healed:
    """What healing did, on the batches that plans are confirmed with."""

    seconds: float
    steps: int
    before: float  # fidelity
    after: float
    run: str = ""  # its folder


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
    asked: Mapping[str, float | str] = field(default_factory=dict)  # limits by name, and the metric's floor
    missed: tuple[str, ...] = ()  # what was asked for and does not hold, in words
    notes: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    onnx: OnnxReport | None = None
