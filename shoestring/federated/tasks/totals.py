"""What one device tells, or many of them together: sums by what they are of, and telemetry. Adding two of them gives a third."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shoestring.federated.tasks.aggregates import ColumnMoments, Histogram

BEFORE, AFTER = "before", "after"  # the device's own training

ALONE, PAIRED, JOINTLY = "alone", "paired", "jointly"

Key = tuple[tuple[int, ...], str, str, str]


@dataclass(frozen=True)
class Telemetry:
    """How it went, without what was found."""

    asked: int = 0  # devices
    devices: int = 0  # that answered
    trainings: int = 0  # of a model on a device
    seconds: float = 0.0  # of all devices together
    up: int = 0  # bytes that they sent,
    down: int = 0  # and that they were given
    errors: tuple[tuple[str, int], ...] = ()  # devices by kind of error; the name of a kind, never its text

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

    about: tuple[int, ...]  # candidates by number
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
    """What one device tells, or many of them together."""

    entries: tuple[MetricSums, ...] = ()
    telemetry: Telemetry = Telemetry()
    failed: tuple[int, ...] = ()  # by candidate: devices on which it gave no finite number

    def plus(self, other: DeviceTotals) -> DeviceTotals:
        mine = {entry.key: entry for entry in self.entries}
        for entry in other.entries:
            mine[entry.key] = mine[entry.key].plus(entry) if entry.key in mine else entry
        longest = max(len(self.failed), len(other.failed))
        failed = [
            sum(one[place] for one in (self.failed, other.failed) if place < len(one)) for place in range(longest)
        ]
        return DeviceTotals(tuple(mine.values()), self.telemetry.plus(other.telemetry), tuple(failed))


def together(several: Iterable[DeviceTotals]) -> DeviceTotals:
    """All of them, added up in the order in which they come."""
    whole = DeviceTotals()
    for one in several:
        whole = whole.plus(one)
    return whole
