"""When a pipeline worker computed: every action of the last step, and for some steps before it how long it was busy.

Times are those of `time.perf_counter`, which on Linux is one clock for all processes of a machine. Machines share no
clock: there a worker counts from the end of the step's last all-reduce, which all workers leave together to within a
message's travel time. So a timeline across machines may be off by that much.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from shoestring.core.workers.actions import ActionSpan
from shoestring.core.workers.staging import OwnTimes, Work, WorkerTimes

KEPT = 200  # number of steps whose idle time is kept


class StepClock:
    """`drains`: all workers meet at the end of a step. Else each worker's idle time is counted from the end of its own
    last step."""

    def __init__(self, same_machine: bool, drains: bool = True) -> None:
        self.same_machine, self.drains = same_machine, drains
        self.spans: Sequence[ActionSpan] = ()
        self.steps: deque[WorkerTimes] = deque(maxlen=KEPT)
        self.count = 0
        self.origin = 0.0

    def note(self, spans: Sequence[ActionSpan]) -> None:
        """A step is done, and all workers of the pipeline have met."""
        before = self.spans[-1].end if self.spans and not self.drains else None
        self.origin = 0.0 if self.same_machine else time.perf_counter()
        self.spans = spans
        if spans:
            busy = sum(one.end - one.begin for one in spans)
            begin = spans[0].begin if before is None else before
            self.steps.append(WorkerTimes(begin - self.origin, spans[-1].end - self.origin, busy))
            self.count += 1

    @property
    def times(self) -> OwnTimes:
        works = (
            Work(
                str(one.action.kind), one.action.piece, one.action.chunk, one.begin - self.origin, one.end - self.origin
            )
            for one in self.spans
        )
        return OwnTimes(tuple(works), tuple(self.steps), self.count - len(self.steps), self.drains)
