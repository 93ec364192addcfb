"""The A/B report: the difference of B to A in percent, for every metric, overall and per group, with its significance.

In a paired design the same devices measure both, and each sends its own difference, so differences between devices
cancel. In an independent design two samples of devices measure A and B (Welch). Intervals are Fieller's (`estimates`),
each at 95 % by itself: one group in twenty is expected to be outside by chance. So the verdict on a group uses Holm's p
value, which holds for all groups of a metric together (Holm 1979, A simple sequentially rejective multiple test
procedure, Scandinavian J. Statistics 6). A difference that is significant only by itself is reported as `perhaps`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite

import numpy as np

from shoestring.core.errors import Mistake
from shoestring.core.files.codec import Json, to_json
from shoestring.core.job import target
from shoestring.federated.playing.seeds import seed_of
from shoestring.federated.tasks.device import Question
from shoestring.federated.tasks.evaluate import ALL, Evaluation, evaluate, failures
from shoestring.federated.tasks.gather import Cohort, ask_and_release
from shoestring.federated.tasks.privacy.release import LEAST, ReleasedTotals
from shoestring.federated.tasks.settings import TuneCandidate
from shoestring.federated.tasks.statistics.estimates import (
    LEVEL,
    WEIGHINGS,
    Difference,
    Means,
    independent_difference,
    paired_difference,
)
from shoestring.federated.tasks.statistics.totals import AFTER, ALONE, BEFORE, PAIRED, MetricSums, Telemetry

SAME = "no difference seen"
LOSS = "loss"


@dataclass(frozen=True)
class Change:
    """B compared with A in one metric. A field is None if A's mean may be 0, so that a percentage of it means nothing."""

    metric: str
    group: str  # ALL, or a group's name
    devices: tuple[int, int]  # that measured A, and that measured B
    a: float  # mean of A
    b: float  # mean of B
    delta: float  # b - a
    error: float  # standard error of delta
    percent: float | None  # delta in % of |a|
    low: float | None  # interval of percent
    high: float | None
    p: float  # p value of no difference
    holm: float  # p value corrected for all groups of the metric
    verdict: str  # better, worse (higher, lower if the goal does not say which is good), perhaps ..., SAME


@dataclass(frozen=True)
class Comparison:
    a: str  # candidates
    b: str
    design: str  # "paired" or "independent"
    by: str  # means over "devices" or "samples"
    when: str  # BEFORE or AFTER the devices' own training
    level: float
    changes: tuple[Change, ...]  # for every metric: all devices, then groups
    telemetry: Telemetry
    least: int
    failed: Mapping[str, int] = field(default_factory=dict)  # candidate -> devices on which it gave no finite number
    withheld: tuple[str, ...] = ()

    def as_json(self) -> Json:
        return {name: to_json(getattr(self, name)) for name in self.__dataclass_fields__}


def compare(
    a: TuneCandidate,
    b: TuneCandidate,
    cohort: Cohort,
    names: Sequence[str],
    by: str = "devices",
    least: int = LEAST,
    apart: bool = False,
) -> Comparison:
    """Compare B with A, both measured on each of these devices, or, if `apart`, A on one half of them and B on the
    other."""
    if apart:
        for_a, for_b = halves(names, cohort.seed)
        first, second = evaluate([a], cohort, for_a, least), evaluate([b], cohort, for_b, least)
        return compare_samples(first, a.name, second, b.name, cohort.job.goal, by)
    check_moment(a, b)
    question = Question((a, b), pair=True)
    seen = ask_and_release(question, cohort, names, least)
    when = AFTER if a.trains else BEFORE
    found = {
        (group, entry.metric): change_of(entry, entry, paired_difference(means(entry, by)), group)
        for group, entry in metric_entries(seen, 0, when, both=True)
    }
    return with_verdicts(
        Comparison(
            a.name,
            b.name,
            "paired",
            by,
            when,
            LEVEL,
            (),
            seen.whole.telemetry,
            least,
            failures([a.name, b.name], seen),
            seen.withheld,
        ),
        found,
        cohort.job.goal,
    )


def compare_samples(
    first: Evaluation, a: str, second: Evaluation, b: str, goal: str, by: str = "devices"
) -> Comparison:
    """Compare B with A, measured on two samples of devices. The evaluations must have no device in common (`halves`)."""
    one, other = first.number_of(a), second.number_of(b)
    check_moment(first.candidates[one], second.candidates[other])
    when = AFTER if first.candidates[one].trains else BEFORE
    ones, others = (
        {(group, entry.metric): entry for group, entry in metric_entries(evaluation.seen, number, when)}
        for evaluation, number in ((first, one), (second, other))
    )
    found = {
        key: change_of(mine, others[key], independent_difference(means(mine, by), means(others[key], by)), key[0])
        for key, mine in ones.items()
        if key in others
    }
    label = (a, b) if a != b else (f"{a} (A)", f"{b} (B)")
    failed = {label[0]: first.failed.get(a, 0), label[1]: second.failed.get(b, 0)}
    return with_verdicts(
        Comparison(
            *label,
            "independent",
            by,
            when,
            LEVEL,
            (),
            first.telemetry.plus(second.telemetry),
            max(first.least, second.least),
            {name: count for name, count in failed.items() if count},
            tuple(dict.fromkeys((*first.withheld, *second.withheld))),
        ),
        found,
        goal,
    )


def check_moment(a: TuneCandidate, b: TuneCandidate) -> None:
    if a.trains != b.trains:
        raise Mistake(
            f"{a.name} and {b.name}: devices train one of them and not the other; compare two that are both trained, or both not"
        )


def halves(names: Sequence[str], seed: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split devices into those for A and those for B, by their names and the seed alone."""
    ordered = sorted(names, key=lambda name: seed_of(seed, "A or B", name))
    first = set(ordered[: len(names) // 2])
    return tuple(name for name in names if name in first), tuple(name for name in names if name not in first)


def metric_entries(seen: ReleasedTotals, candidate: int, when: str, both: bool = False) -> list[tuple[str, MetricSums]]:
    return [
        (group, entry)
        for group, totals in ((ALL, seen.whole), *seen.groups.items())
        for entry in totals.entries
        if entry.when == when
        and (entry.kind == PAIRED if both else entry.kind == ALONE and entry.about == (candidate,))
    ]


def means(entry: MetricSums, by: str) -> Means:
    return WEIGHINGS[by](np.asarray(entry.moments.sums), entry.moments.columns)


def change_of(a: MetricSums, b: MetricSums, found: Difference, group: str) -> Change | None:
    """The change of one metric in one group; None if it is withheld."""
    known = {name: float(value) if isfinite(value) else None for name, value in found._asdict().items()}
    mean, other, delta, error = known["a"], known["b"], known["delta"], known["error"]
    if mean is None or other is None or delta is None or error is None:
        return None
    p = float(found.p) if isfinite(found.p) else 1.0
    return Change(
        a.metric,
        group,
        (a.moments.devices, b.moments.devices),
        mean,
        other,
        delta,
        error,
        known["percent"],
        known["low"],
        known["high"],
        p,
        p,
        SAME,
    )


def with_verdicts(empty: Comparison, found: Mapping[tuple[str, str], Change | None], goal: str) -> Comparison:
    """The comparison with all changes and their verdicts: all devices by the plain p value, groups by Holm's."""
    changes: list[Change] = []
    for metric in sorted({metric for _, metric in found}):
        whole = [one for (group, name), one in found.items() if name == metric and group == ALL and one is not None]
        groups = [one for (group, name), one in found.items() if name == metric and group != ALL and one is not None]
        adjusted = holm([one.p for one in groups])
        groups = [replace(one, holm=p) for one, p in zip(groups, adjusted, strict=True)]
        ahead = empty.failed.get(empty.b, 0) - empty.failed.get(empty.a, 0)
        changes += [replace(one, verdict=verdict(one, goal, 1 - empty.level, ahead)) for one in (*whole, *groups)]
    if not changes:
        why = [f"{name}: no finite number on {count} devices" for name, count in empty.failed.items()] or list(
            empty.withheld
        )
        raise Mistake(
            f"A and B have no metric in common that may be released; {'; '.join(why) or 'nothing was measured'}"
        )
    return replace(empty, changes=tuple(changes))


def holm(p: Sequence[float]) -> list[float]:
    """p values corrected for several tests by Holm's method.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    rising = sorted(range(len(p)), key=lambda place: p[place])
    found, highest = [0.0] * len(p), 0.0
    for rank, place in enumerate(rising):
        highest = max(highest, min((len(p) - rank) * p[place], 1.0))
        found[place] = highest
    return found


def verdict(change: Change, goal: str, chance: float, failures_of_b: int) -> str:
    """The verdict in a word. `failures_of_b`: devices on which B diverged minus those on which A did. Leaving out
    failed devices improves a candidate's mean, so a verdict in favour of the one that failed more often is only a
    `perhaps`."""
    if change.p >= chance:
        return SAME
    wanted = target(goal)
    most = wanted.most if change.metric == wanted.metric else False if change.metric == LOSS else None
    up = change.delta > 0
    word = ("higher" if up else "lower") if most is None else "better" if up == most else "worse"
    praised = failures_of_b > 0 if word == "better" else failures_of_b < 0 if word == "worse" else failures_of_b != 0
    return word if change.holm < chance and not praised else f"perhaps {word}"
