"""Estimate the remaining time of a run; used by terminal and page."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

RECENT = 50  # number of recent steps that give the present speed
YOUNG = 2  # first steps, which are slower than the rest


def usual_step(seconds: Sequence[float], together: int = 1) -> float:
    """Seconds of the median step. Batches that several processes load come `together`: one step waits for all of them,
    so each such group of steps counts as one, with its mean.

    >>> usual_step([1.0, 1.0, 9.0]), usual_step([7.0, 1.0, 1.0, 1.0] * 5, together=4)
    (1.0, 2.5)
    """
    together = max(together, 1)  # a run's file may say anything
    groups = [seconds[end - together : end] for end in range(together, len(seconds) + 1, together)]
    return median(map(fmean, groups or [seconds]))


def pace(seconds: Sequence[float], together: int = 1) -> float | None:
    """Recent seconds per step: the median, which a single slow step does not change. None if unknown.

    `seconds`: of all steps so far; the first two, which warm up, only count if there is little else.

    >>> pace([9.0, 5.0, 1.0, 1.0, 7.0, 1.0]), pace([4.0]), pace([])
    (1.0, 4.0, None)
    """
    usual = seconds[YOUNG:] if len(seconds) > 2 * YOUNG else seconds
    return usual_step(usual[-max(RECENT, together) :], together) or None if usual else None


def time_left(
    step: int, steps: int, seconds: Sequence[float], validations: Sequence[tuple[int, float]] = (), together: int = 1
) -> float | None:
    """Seconds until the last step is done, including validations at the same frequency as before. None if unknown: no
    step was done, or their number is not known.

    `validations`: (step, seconds) of each so far.

    >>> time_left(10, 30, [2.0] * 10), time_left(10, 30, [2.0] * 10, [(5, 3.0), (10, 3.0)]), time_left(10, 0, [2.0] * 10)
    (40.0, 52.0, None)
    """
    one, left = pace(seconds, together), steps - step
    if one is None or left <= 0:
        return None
    coming = (
        max(round(left * len(validations) / validations[-1][0]), 1) if validations and validations[-1][0] > 0 else 0
    )
    return one * left + coming * (median(took for _, took in validations[-RECENT:]) if coming else 0.0)
