"""The time that a run trained: planning before it, and the time that it was stopped or dead, are not part of it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter

from shoestring.show.page.words import Entries, dicts, number, pairs


@dataclass(frozen=True)
class TrainingTime:
    """Tells seconds of training from seconds since the run's first event."""

    planning: float  # seconds before training began
    starts: tuple[float, ...]  # when each life began,
    before: tuple[float, ...]  # and how long it had trained by then
    trained: float  # seconds in all

    def __call__(self, when: float) -> float:
        """
        >>> clock = clock_of({"begun": 100, "last": 160, "samples_process": [[8, 1], [20, 1], [55, 1]],
        ...                   "events": [{"event": "begun", "time": 105}, {"event": "begun", "time": 150}]})
        >>> clock.planning, clock(8), clock(20), clock(55), clock.trained
        (5, 3.0, 15.0, 20.0, 25.0)
        """
        life = max(0, bisect_right(self.starts, when) - 1)
        return max(0.0, when - self.starts[life]) + self.before[life]


def clock_of(story: Entries) -> TrainingTime | None:
    """The clock of a run; None where its events do not say when training began."""
    begun, last = number(story.get("begun")), number(story.get("last"))
    found = [number(event.get("time")) for event in dicts(story.get("events")) if event.get("event") == "begun"]
    if begun is None or last is None or not found:
        return None
    starts = sorted(when - begun for when in found if when is not None)
    samples: Sequence[tuple[float, float]] = pairs(story.get("samples_process"))
    before = [0.0]
    for start, after in pairwise(starts):
        place = bisect_left(samples, after, key=itemgetter(0))
        end = samples[place - 1][0] if place else start  # the last step of that life which counts
        before.append(before[-1] + max(0.0, end - start))
    return (
        TrainingTime(
            max(0.0, starts[0]), tuple(starts), tuple(before), before[-1] + max(0.0, last - begun - starts[-1])
        )
        if starts
        else None
    )
