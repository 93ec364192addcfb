"""Timelines of workers that hold different layers: each records its own actions, and they are reported as one event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoestring.core.running.run import Run
from shoestring.core.running.run_state import RecordsTimes
from shoestring.core.workers.mesh import lines
from shoestring.core.workers.staging import OwnTimes, together
from shoestring.runs.events.event import StageTimes

TOLD_AFTER = 5  # the first report is after so many steps of a process, for `watch`; the last one at the end


def own_times(run: Run) -> OwnTimes | None:
    """This worker's actions and times; None if no part of the run has a schedule."""
    return next((found for part in run.state_that(RecordsTimes) if (found := part.own_times) is not None), None)


def report_timeline(run: Run, steps: int, peak: int) -> StageTimes | None:
    """After a step, the timeline of the whole group, if a report is due; called by all workers."""
    if steps != TOLD_AFTER or own_times(run) is None or run.team.assignment.asynchronous:
        return None
    return stage_times(run, steps, run.team.link.objects({"times": own_times(run), "peak_bytes": peak}))


def stage_times(run: Run, step: int, workers: Sequence[dict[str, Any]]) -> StageTimes | None:
    """The event, from every worker's `times` and `peak_bytes` by rank; None without a schedule."""
    found = (
        [
            together([workers[rank]["times"] for rank in line])
            for line in lines(run.team.mesh.sizes, "stage")
            if all(workers[rank]["times"] is not None for rank in line)
        ]
        if "stage" in run.team.mesh.sizes
        else []
    )
    known = [one for one in found if one is not None]
    if not known:
        return None
    return StageTimes(
        step,
        round(sum(one.idle for one in known) / len(known), 6),
        known[0].steps,
        known[0].timeline,
        tuple(int(one["peak_bytes"]) for one in workers),
        not run.team.link.same_machine,
    )
