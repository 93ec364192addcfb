"""What was measured of a run, from its events: one definition, for the worker's result, the page of a run that goes on, and the report.

    process_bytes    the largest that a process was, of any worker, in any step
    step_seconds     the median step, without the first two of every life, which make what later ones find, as far as there are others
    traffic_bytes    to and from the disk: the median of the same steps (the first step of a run has no moments to read)
    sent_bytes       to other workers: the mean of all steps, because workers that meet every few steps send nothing in between
    sent_by_others_bytes    where workers do not wait for each other: the same of the others, by their own steps
    peak_bytes, ...  of the life with the highest tensor peak, as its `measured` event tells

A life is from one `begun` to the next. Only steps count that were not done again, and only those since another plan was adopted.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

from shoestring.runs.fold import MISSING, Fold

YOUNG = 2   # steps of a life that are unlike those after them


def measured(fold: Fold) -> dict[str, Any]:
    """The figures of the steps that count; nothing if there are none."""
    steps = fold.steps
    if not steps:
        return {}
    since = fold.plan if steps.plan[-1] == fold.plan else 0   # what was before was another plan
    ours = [place for place, plan in enumerate(steps.plan) if plan >= since] if since else range(len(steps))
    lives = [event for plan, event in fold.measured if plan >= since]
    largest: Mapping[str, Any] = max(lives, key=lambda event: int(event["peak_bytes"]), default={})
    calm = settled(fold, ours)
    figures = {key: value for key, value in largest.items() if key not in ("event", "time")}
    figures["process_bytes"] = max(*(steps.most[place] for place in ours), *(event.get("process_bytes", 0) for event in lives), 0)
    figures["step_seconds"] = median(steps.seconds[place] for place in calm)
    if steps.moved[-1] != MISSING:
        figures["traffic_bytes"] = median(max(steps.moved[place], 0) for place in calm)
    if steps.sent[-1] != MISSING:
        figures["sent_bytes"] = mean(max(steps.sent[place], 0) for place in ours)
    return figures


def settled(fold: Fold, ours: Sequence[int]) -> list[int]:
    """The steps without the first ones of every life, as far as there are others."""
    found = ([place for place in ours if fold.steps.age[place] > young] for young in range(YOUNG, -1, -1))
    return next(filter(None, found))


def of_group(workers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A `measured` event of workers that do not wait for each other, from what each found of its own life: the largest counts.

    Each gave what its tensors were at most (peak_bytes, where, parts, flops), process_bytes, its own steps and the bytes it sent in them.
    """
    largest = max(workers, key=lambda one: int(one["peak_bytes"]))
    found = {name: value for name, value in largest.items() if name not in ("steps", "sent")}
    found["process_bytes"] = max(one["process_bytes"] for one in workers)
    others = [one for one in workers[1:] if one["steps"]]
    if others:
        found["sent_by_others_bytes"] = sum(one["sent"] for one in others) / sum(one["steps"] for one in others)
    return found
