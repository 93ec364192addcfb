"""How long a run still takes, by what it took so far. Terminal and page both have it from here."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

RECENT = 50  # steps that say how fast it is now
YOUNG = 2  # steps at the beginning that are unlike those after them


def pace(seconds: Sequence[float]) -> float | None:
    """Seconds of a step lately: the median, which one slow step does not move. None if nothing is known.

    `seconds` of steps from the first; the first two, which warm up, count only where there is little else.

    >>> pace([9.0, 5.0, 1.0, 1.0, 7.0, 1.0]), pace([4.0]), pace([])
    (1.0, 4.0, None)
    """
    usual = seconds[YOUNG:] if len(seconds) > 2 * YOUNG else seconds
    return median(usual[-RECENT:]) or None if usual else None


def time_left(
    step: int, steps: int, seconds: Sequence[float], validations: Sequence[tuple[int, float]] = ()
) -> float | None:
    """Seconds until the last step is done: those of its steps, and of the validations that come as often as before. None if nobody
    knows: no step was done, or it is not known how many there will be.

    `validations`: (step, seconds) of those that were done.

    >>> time_left(10, 30, [2.0] * 10), time_left(10, 30, [2.0] * 10, [(5, 3.0), (10, 3.0)]), time_left(10, 0, [2.0] * 10)
    (40.0, 52.0, None)
    """
    one, left = pace(seconds), steps - step
    if one is None or left <= 0:
        return None
    coming = (
        max(round(left * len(validations) / validations[-1][0]), 1) if validations and validations[-1][0] > 0 else 0
    )
    return one * left + coming * (median(took for _, took in validations[-RECENT:]) if coming else 0.0)
