"""Federated tuning: settings of the devices' own training, chosen by how good the personal models are that they make.

Every device trains with all settings from the same weights, judges each result on what it holds out, and sends sums, with those of products
of any two settings: so settings are compared on the same devices, and what makes a device easy or hard cancels.

By halves, many settings cost little: all of them on few devices, the better half on twice as many others, and so on.

    rung r of R:    C / 2^r settings on N 2^r / (2^R - 1) devices         each rung is about as much work

Every rung asks devices that were not asked before, so an estimate is never one that its setting was selected by, except for the last
choice itself. Karnin, Koren, Somekh 2013, Almost Optimal Exploration in Multi-Armed Bandits, ICML; Jamieson, Talwalkar 2016, Non-stochastic
Best Arm Identification and Hyperparameter Optimization, arXiv 1502.07943.

A setting that diverged on a device is not chosen while there is one that did not: a mean without that device would praise it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, log2

import numpy as np

from shoestring.core.codec import Json, to_json
from shoestring.core.errors import Mistake
from shoestring.core.job import target
from shoestring.federated.tasks.device import Question
from shoestring.federated.tasks.estimates import LEVEL, WEIGHINGS, Means
from shoestring.federated.tasks.evaluate import ALL, failures
from shoestring.federated.tasks.gather import Cohort, seen_of
from shoestring.federated.tasks.release import LEAST, Released, TooFew
from shoestring.federated.tasks.settings import TuneCandidate
from shoestring.federated.tasks.student import tails
from shoestring.federated.tasks.totals import Telemetry


@dataclass(frozen=True)
class Tried:
    """A setting, as it was last tried."""

    candidate: TuneCandidate
    rung: int  # the last one that it was in, from 0
    devices: int
    mean: float | None  # of the metric; None: it failed on some devices
    error: float | None  # standard error
    behind: float | None  # by how much it is worse than the best of its rung,
    behind_error: float | None  # on the same devices
    p: float | None  # of being as good, for all settings of the rung together (Bonferroni)
    as_good: bool  # not significantly worse than the best of its rung


@dataclass(frozen=True)
class Rung:
    settings: int
    devices: int
    telemetry: Telemetry


@dataclass(frozen=True)
class Tuning:
    metric: str
    most: bool  # the largest is best
    by: str  # means over "devices" or "samples"
    best: Tried
    tried: tuple[Tried, ...]  # best first
    rungs: tuple[Rung, ...]
    telemetry: Telemetry
    least: int
    failed: Mapping[str, int] = field(default_factory=dict)  # setting -> devices on which it gave no finite number
    withheld: tuple[str, ...] = ()

    def as_json(self) -> Json:
        return {name: to_json(getattr(self, name)) for name in self.__dataclass_fields__}


def tune(
    candidates: Sequence[TuneCandidate],
    cohort: Cohort,
    names: Sequence[str],
    by: str = "devices",
    least: int = LEAST,
    halving: bool = False,
) -> Tuning:
    """The best of the candidates by the job's goal. `names`: devices in the order in which they are asked."""
    wanted = target(cohort.job.goal)
    sizes = rung_sizes(len(candidates), len(names), least) if halving else [len(names)]
    left, begin, rungs = list(candidates), 0, []
    tried: dict[str, Tried] = {}
    failed: dict[str, int] = {}
    withheld: tuple[str, ...] = ()
    for number, size in enumerate(sizes):
        question = Question(tuple(left), jointly=wanted.metric)
        seen = seen_of(
            question, cohort, names[begin : begin + size], least, whole=ALL
        )  # a setting is chosen for all groups
        found = ranked(left, seen, wanted.most, by, number)
        tried |= {one.candidate.name: one for one in found}
        failed |= failures([one.name for one in left], seen)
        withheld = tuple(dict.fromkeys((*withheld, *seen.withheld)))
        rungs.append(Rung(len(left), seen.whole.telemetry.devices, seen.whole.telemetry))
        left = [one.candidate for one in found[: ceil(len(found) / 2)] if one.mean is not None]
        begin += size
        if len(left) == 1:
            break
    # Who got further stands above; of the same rung, the better one
    order = sorted(tried.values(), key=lambda one: (-one.rung, *standing(one)))
    telemetry = Telemetry()
    for rung in rungs:
        telemetry = telemetry.plus(rung.telemetry)
    return Tuning(
        wanted.metric, wanted.most, by, order[0], tuple(order), tuple(rungs), telemetry, least, failed, withheld
    )


def standing(one: Tried) -> tuple[bool, float]:
    return one.mean is None, one.behind if one.behind is not None else 0.0


def rung_sizes(settings: int, devices: int, least: int) -> list[int]:
    """Devices of every rung: twice as many each time, and never fewer than `least`.

    >>> rung_sizes(16, 300, 10), rung_sizes(16, 25, 10), rung_sizes(1, 50, 10)
    ([20, 40, 80, 160], [25], [50])
    """
    if devices < least:
        raise TooFew(f"{devices} devices, and nothing is told about fewer than {least}: ask more of them")
    rungs = max(ceil(log2(settings)), 1) if settings > 1 else 1
    while devices // (2**rungs - 1) < least:
        rungs -= 1
    first = devices // (2**rungs - 1)
    sizes = [first * 2**number for number in range(rungs)]
    return [*sizes[:-1], devices - sum(sizes[:-1])]


def ranked(candidates: Sequence[TuneCandidate], seen: Released, most: bool, by: str, rung: int) -> list[Tried]:
    """The candidates of one rung, best first, and those that failed at the end, fewest failures first."""
    entry = seen.whole.entries[0]
    means = WEIGHINGS[by](np.asarray(entry.moments.sums), len(candidates))
    if not np.isfinite(means.mean).all():
        raise Mistake(
            "means over samples are withheld, because one device may have more than half of them: tune by means over devices"
        )
    fails = [*seen.whole.failed, *[0] * (len(candidates) - len(seen.whole.failed))]
    good = [place for place in range(len(candidates)) if not fails[place]]
    if not good:
        least = min(range(len(candidates)), key=lambda place: fails[place])
        raise Mistake(
            f"every setting diverged on some device, {candidates[least].name} on the fewest, {fails[least]} of "
            f"{entry.moments.devices}: try smaller rates, or fewer epochs"
        )
    good.sort(key=lambda place: -means.mean[place] if most else means.mean[place])
    found = [
        one_tried(candidates[place], place, good[0], means, len(good), most, rung, entry.moments.devices)
        for place in good
    ]
    bad = sorted((place for place in range(len(candidates)) if fails[place]), key=lambda place: fails[place])
    return found + [
        Tried(candidates[place], rung, entry.moments.devices, None, None, None, None, None, False) for place in bad
    ]


def one_tried(
    candidate: TuneCandidate, place: int, best: int, means: Means, compared: int, most: bool, rung: int, devices: int
) -> Tried:
    """A candidate beside the best of its rung. What rounding of the sums can hide counts as uncertain."""
    behind = float((means.mean[best] - means.mean[place]) * (1 if most else -1))
    variance = means.cov[place, place] + means.cov[best, best] - 2 * means.cov[place, best]
    error = float(np.sqrt(max(variance, means.rounding[place] + means.rounding[best]))) if place != best else 0.0
    p = min(tails(behind / error, float(means.df)) * max(compared - 1, 1), 1.0) if error else 1.0
    mean, own = float(means.mean[place]), float(np.sqrt(means.cov[place, place]))
    return Tried(candidate, rung, devices, mean, own, behind, error, p, p >= 1 - LEVEL)
