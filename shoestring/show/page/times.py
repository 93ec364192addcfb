"""The time that a run trained, without planning and without the time that it was stopped or dead."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter

from shoestring.runs.events.event import Begun
from shoestring.runs.reports.report import Report


@dataclass(frozen=True)
class TrainingTime:
    """Converts seconds since the run's first event to seconds of training."""

    planning: float  # seconds before training started
    starts: tuple[float, ...]  # when each life started,
    before: tuple[float, ...]  # and how long it had trained by then
    trained: float  # total seconds of training

    def __call__(self, when: float) -> float:
        """
        >>> from shoestring.runs.reports.report import Curves
        >>> lives = [Begun(steps=9, step=0, time=105), Begun(steps=9, step=2, time=150)]
        >>> clock = clock_of(Report(begun=100, last=160, curves=Curves(process=[(8, 1), (20, 1), (55, 1)]), events=lives))
        >>> clock.planning, clock(8), clock(20), clock(55), clock.trained
        (5, 3.0, 15.0, 20.0, 25.0)
        """
        life = max(0, bisect_right(self.starts, when) - 1)
        return max(0.0, when - self.starts[life]) + self.before[life]


def clock_of(report: Report) -> TrainingTime | None:
    """The clock of a run; None if its events do not say when training started."""
    begun, last, samples = report.begun, report.last, report.curves.process
    if begun is None or last is None:
        return None
    starts = sorted(event.time - begun for event in report.events if isinstance(event, Begun))
    if not starts:
        return None
    before = [0.0]
    for start, after in pairwise(starts):
        place = bisect_left(samples, after, key=itemgetter(0))
        end = samples[place - 1][0] if place else start  # the last counted step of that life
        before.append(before[-1] + max(0.0, end - start))
    trained = before[-1] + max(0.0, last - begun - starts[-1])
    return TrainingTime(max(0.0, starts[0]), tuple(starts), tuple(before), trained)
