"""How long a step waits for its batch: no technique changes it, and it may be most of a step.

no processes for data      seconds of making a batch
processes that load ahead  seconds between two batches, less those in which the step computes; 0 if they are faster
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import islice
from statistics import fmean, median

from shoestring.core.batch import Batch
from shoestring.core.job import Job
from shoestring.data.feed import looking
from shoestring.measure.load import Effort, Timing, effort, timing

MOST, LONGEST = 16, 1.0  # batches that are timed, and seconds after which no other is begun
Clock = Callable[[], float]


def seconds_waiting(
    job: Job, step: float, clock: Clock = time.perf_counter, now: Callable[[], Effort] = effort
) -> float:
    """Seconds that a step of the job waits for its batch; `step`: those that it takes once it has one."""
    with looking(job) as feed:  # which starts none of the processes of Job(workers=...)
        batches = iter(feed)
        if next(batches, None) is None:  # the first one opens files and starts the processes of a DataLoader
            return 0.0
        times = list(islice(fetch_times(batches, clock, now), MOST))
        processes = feed.mapped and job.workers
        if not times:
            return 0.0
        if processes or feed.loading_processes[0]:
            return max(fmean(one.seconds for one in times) / max(processes, 1) - step, 0.0)
        return median(quiet_seconds(one) for one in times)


def quiet_seconds(fetch: Timing) -> float:
    """The seconds of a fetch on a quiet machine. One that waits for a disk or a network does not wait for a core then.

    >>> quiet_seconds(Timing(0.25, ran=0.01, waited=0.05)), quiet_seconds(Timing(4.0, ran=2.0, waited=6.0))
    (0.2, 1.0)
    """
    return max(fetch.seconds - fetch.waited, fetch.alone)


def fetch_times(batches: Iterator[Batch], clock: Clock, now: Callable[[], Effort]) -> Iterator[Timing]:
    """The time that each of the next batches takes."""
    begun = clock()
    while (start := clock()) - begun < LONGEST:
        before = now()
        if next(batches, None) is None:
            return
        yield timing(clock() - start, before, now())
