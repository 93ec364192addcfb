"""Pushes: counts of the gradients that workers sent, by worker and by staleness.

staleness s    updates of the weights between the version a gradient was computed on and the one it was applied to
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

from shoestring.core.running.run_state import RunState


class Pushes(RunState):
    """Counts of pushes so far. Part of the run's state, and of its report."""

    def __init__(self, corrected: bool | None) -> None:
        self.corrected = corrected  # whether the rate was divided by staleness; None: nothing stale was used
        self.staleness: Counter[int] = Counter()  # applied pushes by staleness
        self.applied: Counter[int] = Counter()  # applied pushes by worker
        self.dropped: Counter[int] = Counter()  # pushes that came too late, by worker

    def add(self, rank: int, staleness: int, count: int = 1) -> None:
        self.staleness[staleness] += count
        self.applied[rank] += count

    def state_dict(self) -> dict[str, Any]:
        tallies = {
            name: {str(key): count for key, count in sorted(tally.items()) if count}
            for name, tally in self.tallies().items()
        }
        return {"corrected": self.corrected} | tallies

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, tally in self.tallies().items():
            tally.clear()
            tally.update({int(key): count for key, count in state[name].items()})

    def tallies(self) -> dict[str, Counter[int]]:
        return {"staleness": self.staleness, "applied": self.applied, "dropped": self.dropped}


def may_begin(version: int, out: Collection[int], delay: int) -> bool:
    """Whether one more worker may begin on this version without making any gradient staler than `delay`.

    `out` are the versions that others compute on now. In the worst case the oldest is pushed last, after all others:

        version + |out| - min(out) <= delay

    >>> may_begin(5, [], 0), may_begin(5, [5], 0), may_begin(5, [3, 4], 4), may_begin(5, [3, 4], 3)
    (True, False, True, False)
    """
    return not out or version + len(out) - min(out) <= delay
