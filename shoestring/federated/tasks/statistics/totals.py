"""The answer of one device, or the sum of many answers: metric sums and telemetry. Two totals add up to another one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shoestring.federated.tasks.statistics.aggregates import ColumnMoments, Histogram

BEFORE, AFTER = "before", "after"  # a device's local training

ALONE, PAIRED, JOINTLY = "alone", "paired", "jointly"

Key = tuple[tuple[int, ...], str, str, str]


@dataclass(frozen=True)
class Telemetry:
    """How the work went, without any results."""

    asked: int = 0  # devices asked
    devices: int = 0  # devices that answered
    trainings: int = 0  # candidates trained, over all devices
    seconds: float = 0.0  # of all devices together
    up: int = 0  # bytes sent by devices,
    down: int = 0  # and to them
    errors: tuple[tuple[str, int], ...] = ()  # number of devices by exception class; never an error message

    def plus(self, other: Telemetry) -> Telemetry:
        kinds = dict(self.errors)
        for kind, count in other.errors:
            kinds[kind] = kinds.get(kind, 0) + count
        return Telemetry(
            self.asked + other.asked,
            self.devices + other.devices,
            self.trainings + other.trainings,
            self.seconds + other.seconds,
            self.up + other.up,
            self.down + other.down,
            tuple(sorted(kinds.items())),
        )


@dataclass(frozen=True)
class MetricSums:
    """Sums of one metric."""

    about: tuple[int, ...]  # numbers of the candidates
    when: str  # BEFORE or AFTER the device's own training
    metric: str
    moments: ColumnMoments
    histogram: Histogram | None = None
    kind: str = ALONE  # PAIRED: the columns are a and b - a; JOINTLY: a column for every candidate

    @property
    def key(self) -> Key:
        return self.about, self.when, self.metric, self.kind

    @property
    def numbers(self) -> int:
        return len(self.moments.sums) + (len(self.histogram.counts) if self.histogram is not None else 0)

    def plus(self, other: MetricSums) -> MetricSums:
        both = (
            self.histogram.plus(other.histogram) if self.histogram is not None and other.histogram is not None else None
        )
        return MetricSums(self.about, self.when, self.metric, self.moments.plus(other.moments), both, self.kind)


@dataclass(frozen=True)
class DeviceTotals:
    """The answer of one device, or the sum of many answers."""

    entries: tuple[MetricSums, ...] = ()
    telemetry: Telemetry = Telemetry()
    failed: tuple[int, ...] = ()  # for every candidate: devices on which a metric was not finite

    def plus(self, other: DeviceTotals) -> DeviceTotals:
        mine = {entry.key: entry for entry in self.entries}
        for entry in other.entries:
            mine[entry.key] = mine[entry.key].plus(entry) if entry.key in mine else entry
        longest = max(len(self.failed), len(other.failed))
        failed = [
            sum(one[place] for one in (self.failed, other.failed) if place < len(one)) for place in range(longest)
        ]
        return DeviceTotals(tuple(mine.values()), self.telemetry.plus(other.telemetry), tuple(failed))


def sum_totals(several: Iterable[DeviceTotals]) -> DeviceTotals:
    """Add up totals in the given order."""
    whole = DeviceTotals()
    for one in several:
        whole = whole.plus(one)
    return whole
