"""Which sums the developer may see: nothing about fewer than `least` devices.

    a metric        measured by fewer devices is withheld
    a group         of fewer devices is merged with the next smallest until there are enough. Leaving it out would not hide it: it would be
                    the whole minus the other groups
    a bin           of fewer devices is merged with the next one
    over samples    means over samples are withheld if one device may have more than half of the samples (sqrt(sum w^2) > sum w / 2)

Protected: every number is about `least` devices or more, and so is the difference of any two numbers of one release.
The rungs of a tuning ask different devices, so this holds between rungs, too. A result is refused if any of its numbers,
added to and subtracted from those of one earlier result, would be about a few devices (`registry`, `overlap`).
Not protected: combinations of three or more releases about overlapping devices; two releases about the same devices if
one device changed its records in between; devices that were given other names in between; anything against a developer
who has the records of all devices but one; and how many devices diverged or had which kind of error. These need noise:
sums by themselves are not differentially private.

Contract: Everything that a developer sees comes from `release_totals` (tests/federated/tasks/privacy/test_release.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import isnan, nan, sqrt

from shoestring.core.errors import Mistake
from shoestring.federated.tasks.statistics.aggregates import HEAD, ColumnMoments, Histogram
from shoestring.federated.tasks.statistics.totals import DeviceTotals, Key, MetricSums, Telemetry, sum_totals

LEAST = 10  # devices that a released number must be about
LARGEST = 0.5  # largest share of the samples that one device may have
OTHERS = "others"  # name of the merged small groups


@dataclass(frozen=True)
class ReleasedTotals:
    """The sums that the developer sees."""

    whole: DeviceTotals
    groups: Mapping[str, DeviceTotals]  # empty if there are no groups, or if merging leaves a single one
    least: int
    withheld: tuple[str, ...] = ()  # what was withheld, and why


class TooFew(Mistake):
    """There are too few devices to release anything."""


def release_totals(by_group: Mapping[str, DeviceTotals], least: int = LEAST) -> ReleasedTotals:
    """The part of the groups' sums that the developer may see. Raises TooFew if all devices together are too few."""
    if least < 2:
        raise Mistake(f"least={least}: with less than 2, a single device's result would be released; {LEAST} is usual")
    whole = sum_totals(by_group.values())
    if whole.telemetry.devices < least:
        raise TooFew(
            f"{whole.telemetry.devices} devices answered, and results are released for at least {least}: ask more devices"
            f"{errors_text(whole)}"
        )
    few = sorted({entry.metric for entry in whole.entries if entry.moments.devices < least})
    kept = {name: drop_rare_metrics(totals, whole, least) for name, totals in by_group.items()}
    pooled, joined = pooled_groups(kept, least)
    # A metric may be named after a record, so those of few devices are counted
    withheld = [f"{len(few)} metric{'s' * (len(few) > 1)}: measured by fewer than {least} devices"] * bool(few)
    withheld += [
        f"{joined} groups have fewer than {least} devices, or are needed to hide such a group: they are merged as {OTHERS!r}"
    ] * bool(joined and len(pooled) > 1)
    withheld += [f"groups: all but one would have fewer than {least} devices"] * (len(pooled) < 2 <= len(by_group))
    uneven = {entry.key for totals in pooled.values() for entry in totals.entries if is_dominated(entry)}
    groups = (
        {
            name: replace(
                coarsen(totals, least, uneven), telemetry=Telemetry(devices=totals.telemetry.devices), failed=()
            )
            for name, totals in pooled.items()
        }
        if len(pooled) > 1
        else {}
    )
    all_devices = drop_rare_metrics(whole, whole, least)
    found = coarsen(all_devices, least, {entry.key for entry in all_devices.entries if is_dominated(entry)})
    masked = sorted(uneven_metrics(found).union(*map(uneven_metrics, groups.values())))
    withheld += [
        f"{metric} over samples{' of groups' * (metric not in uneven_metrics(found))}: one device may have more than half of them"
        for metric in masked
    ]
    return ReleasedTotals(found, groups, least, tuple(withheld))


def errors_text(whole: DeviceTotals) -> str:
    return (
        "; " + ", ".join(f"{count} {kind}" for kind, count in whole.telemetry.errors) if whole.telemetry.errors else ""
    )


def drop_rare_metrics(totals: DeviceTotals, whole: DeviceTotals, least: int) -> DeviceTotals:
    """Drop the metrics that too few of all devices measured."""
    enough = {entry.key for entry in whole.entries if entry.moments.devices >= least}
    return replace(totals, entries=tuple(entry for entry in totals.entries if entry.key in enough))


def fewest_devices(totals: DeviceTotals) -> int:
    """The smallest number of devices that any entry is about."""
    return min([totals.telemetry.devices, *(entry.moments.devices for entry in totals.entries)])


def pooled_groups(by_group: Mapping[str, DeviceTotals], least: int) -> tuple[dict[str, DeviceTotals], int]:
    """Merge small groups until each has enough devices; also return how many groups were merged.

    The merged group must have enough devices, too, because it equals the whole minus all other groups.
    """
    rising = sorted(by_group, key=lambda name: (fewest_devices(by_group[name]), name))
    small = [name for name in rising if fewest_devices(by_group[name]) < least]
    while small and len(small) < len(rising) and fewest_devices(sum_totals(by_group[name] for name in small)) < least:
        small = rising[: len(small) + 1]
    found = {name: totals for name, totals in by_group.items() if name not in small}
    if small:
        name = OTHERS if OTHERS not in found else f"{OTHERS} (small groups)"
        found[name] = sum_totals(totals for group, totals in by_group.items() if group in small)
    return found, len(small)


def is_dominated(entry: MetricSums) -> bool:
    """Whether one device may have more than half of the samples."""
    w, w2 = entry.moments.sums[1:3]
    return sqrt(w2) > LARGEST * w


def uneven_metrics(totals: DeviceTotals) -> set[str]:
    return {entry.metric for entry in totals.entries if isnan(entry.moments.sums[1])}


def coarsen(totals: DeviceTotals, least: int, uneven: Collection[Key]) -> DeviceTotals:
    """Merge histogram bins, and drop sums over samples of the `uneven` metrics. The caller drops a metric in all
    groups: otherwise the other groups would reveal it."""
    return replace(
        totals,
        entries=tuple(
            replace(
                entry,
                moments=by_devices_alone(entry.moments) if entry.key in uneven else entry.moments,
                histogram=join_bins(entry.histogram, least) if entry.histogram is not None else None,
            )
            for entry in totals.entries
        ),
    )


def by_devices_alone(moments: ColumnMoments) -> ColumnMoments:
    k = moments.columns
    own = k + k * (k + 1) // 2  # how many numbers means over devices need
    return ColumnMoments(
        k,
        (
            moments.sums[0],
            *[nan] * (HEAD - 1),
            *moments.sums[HEAD : HEAD + own],
            *[nan] * (len(moments.sums) - HEAD - own),
        ),
    )


def join_bins(histogram: Histogram, least: int) -> Histogram | None:
    """Merge neighbouring bins until each has enough devices; None if all devices together are too few for two bins.

    >>> join_bins(Histogram((0.0, 1.0, 2.0, 3.0), (0, 3, 9, 12, 2)), 10)
    Histogram(edges=(2.0,), counts=(12, 14))
    """
    bins: list[tuple[int, float]] = []  # (devices, right edge)
    held = 0
    for count, edge in zip(histogram.counts, (*histogram.edges, nan), strict=True):
        held += count
        if held >= least:
            bins.append((held, edge))
            held = 0
    if not bins:
        return None
    counts = [count for count, _ in bins]
    counts[-1] += held
    edges = tuple(edge for _, edge in bins[:-1])
    return Histogram(edges, tuple(counts)) if edges else None
