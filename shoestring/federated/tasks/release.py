"""What of the sums the developer may see: nothing about fewer than `least` devices.

    a metric        that fewer devices measured is withheld
    a group         of fewer devices is put together with the next smallest, until there are enough: were it only left out, the whole
                    minus the other groups would tell it
    a bin           of fewer devices is put together with the next one
    over samples    the sums by samples are withheld where one device may have more than half of them (sqrt(sum w^2) > sum w / 2)

Protected: every number is about `least` devices or more, and so is every difference of two numbers of one release; the rungs of a tuning
use other devices each, so that theirs are, too. A result about devices that are nearly those of an earlier one, because others were asked
or because others answered, is refused (`registry`): the difference would be about the few.
Not protected: what three or more releases of overlapping devices give together; two of the same devices one of which has other records
the second time; what a developer knows who has the records of all devices but one; and how many devices met which kind of error or
diverged. That needs noise: sums are not differentially private by being sums.

Contract: All that a developer sees of it comes out of `released` (tests/federated/tasks/test_release.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import isnan, nan, sqrt

from shoestring.core.errors import Mistake
from shoestring.federated.tasks.aggregates import HEAD, ColumnMoments, Histogram
from shoestring.federated.tasks.totals import DeviceTotals, Key, MetricSums, Telemetry, together

LEAST = 10  # devices
LARGEST = 0.5  # share of the samples that one device may have
OTHERS = "others"  # the name of small groups that were put together


@dataclass(frozen=True)
class Released:
    """What the developer sees."""

    whole: DeviceTotals
    groups: Mapping[str, DeviceTotals]  # empty: there are none, or all but one are too small
    least: int
    withheld: tuple[str, ...] = ()  # what is not in it, in words


class TooFew(Mistake):
    """Nothing can be said about so few devices."""


def released(by_group: Mapping[str, DeviceTotals], least: int = LEAST) -> Released:
    """The sums of groups of devices, as far as they may be seen; where even all devices are too few, `TooFew`."""
    if least < 2:
        raise Mistake(f"least={least}: at least 2, or one device's result would be seen; {LEAST} is usual")
    whole = together(by_group.values())
    if whole.telemetry.devices < least:
        raise TooFew(
            f"{whole.telemetry.devices} devices answered, and nothing is told about fewer than {least}: ask more of them"
            f"{errors_text(whole)}"
        )
    few = sorted({entry.metric for entry in whole.entries if entry.moments.devices < least})
    kept = {name: without(totals, whole, least) for name, totals in by_group.items()}
    pooled, joined = pooled_groups(kept, least)
    withheld = [f"{metric}: fewer than {least} devices measured it" for metric in few]
    withheld += [
        f"{joined} groups have fewer than {least} devices, or would give such a one away: they are put together as "
        f"{OTHERS!r}"
    ] * bool(joined and len(pooled) > 1)
    withheld += [f"groups: all but one would have fewer than {least} devices"] * (len(pooled) < 2 <= len(by_group))
    uneven = {entry.key for totals in pooled.values() for entry in totals.entries if dominated(entry)}
    groups = (
        {
            name: replace(
                coarse(totals, least, uneven), telemetry=Telemetry(devices=totals.telemetry.devices), failed=()
            )
            for name, totals in pooled.items()
        }
        if len(pooled) > 1
        else {}
    )
    all_devices = without(whole, whole, least)
    found = coarse(all_devices, least, {entry.key for entry in all_devices.entries if dominated(entry)})
    masked = sorted(uneven_in(found).union(*map(uneven_in, groups.values())))
    withheld += [
        f"{metric} over samples{' of groups' * (metric not in uneven_in(found))}: one device may have more than half of them"
        for metric in masked
    ]
    return Released(found, groups, least, tuple(withheld))


def errors_text(whole: DeviceTotals) -> str:
    return (
        "; " + ", ".join(f"{count} {kind}" for kind, count in whole.telemetry.errors) if whole.telemetry.errors else ""
    )


def without(totals: DeviceTotals, whole: DeviceTotals, least: int) -> DeviceTotals:
    """Without what too few of all devices measured."""
    enough = {entry.key for entry in whole.entries if entry.moments.devices >= least}
    return replace(totals, entries=tuple(entry for entry in totals.entries if entry.key in enough))


def smallest(totals: DeviceTotals) -> int:
    """The fewest devices that anything in it is about."""
    return min([totals.telemetry.devices, *(entry.moments.devices for entry in totals.entries)])


def pooled_groups(by_group: Mapping[str, DeviceTotals], least: int) -> tuple[dict[str, DeviceTotals], int]:
    """Groups of enough devices each, and how many were put together for that.

    Whoever subtracts all groups that stand from the whole gets those that were put together, so these are enough, too.
    """
    rising = sorted(by_group, key=lambda name: (smallest(by_group[name]), name))
    small = [name for name in rising if smallest(by_group[name]) < least]
    while small and len(small) < len(rising) and smallest(together(by_group[name] for name in small)) < least:
        small = rising[: len(small) + 1]
    found = {name: totals for name, totals in by_group.items() if name not in small}
    if small:
        name = OTHERS if OTHERS not in found else f"{OTHERS} (small groups)"
        found[name] = together(totals for group, totals in by_group.items() if group in small)
    return found, len(small)


def dominated(entry: MetricSums) -> bool:
    """Whether one device may have more than half of the samples."""
    w, w2 = entry.moments.sums[1:3]
    return sqrt(w2) > LARGEST * w


def uneven_in(totals: DeviceTotals) -> set[str]:
    return {entry.metric for entry in totals.entries if isnan(entry.moments.sums[1])}


def coarse(totals: DeviceTotals, least: int, uneven: Collection[Key]) -> DeviceTotals:
    """With bins of enough devices, and without sums by samples of what is `uneven`: in all groups, or the others would give it away."""
    return replace(
        totals,
        entries=tuple(
            replace(
                entry,
                moments=by_devices_alone(entry.moments) if entry.key in uneven else entry.moments,
                histogram=joined(entry.histogram, least) if entry.histogram is not None else None,
            )
            for entry in totals.entries
        ),
    )


def by_devices_alone(moments: ColumnMoments) -> ColumnMoments:
    k = moments.columns
    own = k + k * (k + 1) // 2  # numbers of means over devices
    return ColumnMoments(
        k,
        (
            moments.sums[0],
            *[nan] * (HEAD - 1),
            *moments.sums[HEAD : HEAD + own],
            *[nan] * (len(moments.sums) - HEAD - own),
        ),
    )


def joined(histogram: Histogram, least: int) -> Histogram | None:
    """The same with neighbouring bins put together until each has enough devices; None if all together have not.

    >>> joined(Histogram((0.0, 1.0, 2.0, 3.0), (0, 3, 9, 12, 2)), 10)
    Histogram(edges=(2.0,), counts=(12, 14))
    """
    bins: list[tuple[int, float]] = []  # devices, and the edge at the right
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
