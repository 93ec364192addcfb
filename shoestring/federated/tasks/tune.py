"""Federated tuning: choose the settings of local training that give the best personal models.

Every device trains with all settings from the same weights, evaluates each result on its held-out records, and sends
sums, including products of any two settings. So settings are compared on the same devices, and differences between
devices cancel.

Successive halving makes many settings cheap: all of them on few devices, the better half on twice as many other
devices, and so on.

    rung r of R:    C / 2^r settings on N 2^r / (2^R - 1) devices         each rung is about as much work

Every rung asks new devices, so an estimate is independent of the selections before it; only the final choice is
selected by its own estimate. Karnin, Koren, Somekh 2013, Almost Optimal Exploration in Multi-Armed Bandits, ICML;
Jamieson, Talwalkar 2016, Non-stochastic Best Arm Identification and Hyperparameter Optimization, arXiv 1502.07943.

A setting that diverged on some device is chosen only if all did: a mean without that device would be too good.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, log2

import numpy as np

from shoestring.core.errors import Mistake
from shoestring.core.files.codec import Json, to_json
from shoestring.core.job import target
from shoestring.federated.tasks.device import Question
from shoestring.federated.tasks.evaluate import ALL, failures
from shoestring.federated.tasks.gather import Cohort, ask_and_release
from shoestring.federated.tasks.privacy.release import LEAST, ReleasedTotals, TooFew
from shoestring.federated.tasks.settings import TuneCandidate
from shoestring.federated.tasks.statistics.estimates import LEVEL, WEIGHINGS, Means
from shoestring.federated.tasks.statistics.student import tails
from shoestring.federated.tasks.statistics.totals import Telemetry


@dataclass(frozen=True)
class TriedSetting:
    """A setting and its results in the last rung that tried it."""

    candidate: TuneCandidate
    rung: int  # from 0
    devices: int
    mean: float | None  # of the metric; None: it failed on some devices
    error: float | None  # standard error of the mean
    behind: float | None  # how much worse it is than the best of its rung, on the same devices
    behind_error: float | None  # standard error of that
    p: float | None  # p value of being as good, corrected for all settings of the rung (Bonferroni)
    as_good: bool  # not significantly worse than the best of its rung


@dataclass(frozen=True)
class Rung:
    settings: int
    devices: int
    telemetry: Telemetry


@dataclass(frozen=True)
class Tuning:
    metric: str
    most: bool  # whether larger is better
    by: str  # means over "devices" or "samples"
    best: TriedSetting
    tried: tuple[TriedSetting, ...]  # best first
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
    """Find the best candidate by the job's goal. `names`: devices in the order in which they are asked."""
    wanted = target(cohort.job.goal)
    sizes = rung_sizes(len(candidates), len(names), least) if halving else [len(names)]
    left, begin, rungs = list(candidates), 0, []
    tried: dict[str, TriedSetting] = {}
    failed: dict[str, int] = {}
    withheld: tuple[str, ...] = ()
    for number, size in enumerate(sizes):
        question = Question(tuple(left), jointly=wanted.metric)
        seen = ask_and_release(
            question, cohort, names[begin : begin + size], least, whole=ALL
        )  # one setting is chosen for all groups together
        found = rank_rung(left, seen, wanted.most, by, number)
        tried |= {one.candidate.name: one for one in found}
        failed |= failures([one.name for one in left], seen)
        withheld = tuple(dict.fromkeys((*withheld, *seen.withheld)))
        rungs.append(Rung(len(left), seen.whole.telemetry.devices, seen.whole.telemetry))
        left = [one.candidate for one in found[: ceil(len(found) / 2)] if one.mean is not None]
        begin += size
        if len(left) == 1:
            break
    # Later rungs first; within a rung, the better setting first
    order = sorted(tried.values(), key=lambda one: (-one.rung, *sort_key(one)))
    telemetry = Telemetry()
    for rung in rungs:
        telemetry = telemetry.plus(rung.telemetry)
    return Tuning(
        wanted.metric, wanted.most, by, order[0], tuple(order), tuple(rungs), telemetry, least, failed, withheld
    )


def sort_key(one: TriedSetting) -> tuple[bool, float]:
    return one.mean is None, one.behind if one.behind is not None else 0.0


def rung_sizes(settings: int, devices: int, least: int) -> list[int]:
    """Devices of every rung: twice as many each time, and never fewer than `least`.

    >>> rung_sizes(16, 300, 10), rung_sizes(16, 25, 10), rung_sizes(1, 50, 10)
    ([20, 40, 80, 160], [25], [50])
    """
    if devices < least:
        raise TooFew(f"{devices} devices, and results are released for at least {least}: ask more devices")
    rungs = max(ceil(log2(settings)), 1) if settings > 1 else 1
    while devices // (2**rungs - 1) < least:
        rungs -= 1
    first = devices // (2**rungs - 1)
    sizes = [first * 2**number for number in range(rungs)]
    return [*sizes[:-1], devices - sum(sizes[:-1])]


@dataclass(frozen=True)
class RungEstimates:
    """What the candidates of one rung are compared by."""

    number: int  # from 0
    devices: int
    means: Means
    best: int  # place of the best candidate
    compared: int  # candidates that did not fail
    most: bool  # whether larger is better


def rank_rung(
    candidates: Sequence[TuneCandidate], seen: ReleasedTotals, most: bool, by: str, rung: int
) -> list[TriedSetting]:
    """Rank the candidates of a rung: the best first, then those that failed on some device, fewest failures first."""
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
            f"{entry.moments.devices}: try smaller learning rates, or fewer epochs"
        )
    good.sort(key=lambda place: -means.mean[place] if most else means.mean[place])
    estimates = RungEstimates(rung, entry.moments.devices, means, good[0], len(good), most)
    found = [tried_setting(candidates[place], place, estimates) for place in good]
    bad = sorted((place for place in range(len(candidates)) if fails[place]), key=lambda place: fails[place])
    return found + [
        TriedSetting(candidates[place], rung, entry.moments.devices, None, None, None, None, None, False)
        for place in bad
    ]


def tried_setting(candidate: TuneCandidate, place: int, rung: RungEstimates) -> TriedSetting:
    """A candidate compared with the best of its rung. The standard error is at least what rounding of the sums can
    hide."""
    means, best = rung.means, rung.best
    behind = float((means.mean[best] - means.mean[place]) * (1 if rung.most else -1))
    variance = means.cov[place, place] + means.cov[best, best] - 2 * means.cov[place, best]
    error = float(np.sqrt(max(variance, means.rounding[place] + means.rounding[best]))) if place != best else 0.0
    p = min(tails(behind / error, float(means.df)) * max(rung.compared - 1, 1), 1.0) if error else 1.0
    mean, own = float(means.mean[place]), float(np.sqrt(means.cov[place, place]))
    return TriedSetting(candidate, rung.number, rung.devices, mean, own, behind, error, p, p >= 1 - LEVEL)
