"""The section on asynchronous workers: staleness of gradients, and the number of gradients per worker."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from shoestring.runs.report import Report, StalenessReport
from shoestring.show.page.drawing import Strip, strip
from shoestring.show.page.render import render
from shoestring.show.page.words import counted

MOST = 12  # most rows
NOTES = {
    True: "The correction was on: the rate of a step was divided by its staleness.",
    False: "The correction was off: a stale gradient counted as much as a fresh one.",
    None: "Only gradients of the newest weights were used; those that came too late were dropped.",
}


@dataclass(frozen=True)
class StalenessRow:
    """Gradients of one staleness."""

    age: str
    count: float
    bar: Strip


@dataclass(frozen=True)
class StaleWorker:
    rank: int
    used: int  # number of gradients applied
    dropped: int


def staleness(report: Report) -> Markup:
    """Gradients by staleness as bars, and by worker."""
    told = report.result.state_of_techniques.pushes if report.result is not None else None
    found = sorted(told.staleness.items()) if told is not None else []
    total = sum(count for _, count in found)
    if told is None or total <= 0:
        return Markup()
    mean = sum(age * count for age, count in found) / total
    note = (
        f"{counted(total, 'gradient')} moved the weights, computed on weights that were {mean:.1f} versions old on average and "
        f"{found[-1][0]} at most. {NOTES[told.corrected]}"
    )
    counts = [(str(age), count) for age, count in found[:MOST]]
    rest = sum(count for _, count in found[MOST:])
    counts += [(f"{found[MOST][0]} or more", rest)] if rest else []
    most = max(count for _, count in counts)
    rows = [
        StalenessRow(age, count, strip(f"staleness {age}: {count:,.0f}", [(0, count / most, "gradients")]))
        for age, count in counts
    ]
    return render("staleness.html", note=note, rows=rows, workers=workers(told))


def workers(told: StalenessReport) -> list[StaleWorker]:
    ranks = sorted({*told.applied, *told.dropped})[:MOST]
    return [StaleWorker(rank, told.applied.get(rank, 0), told.dropped.get(rank, 0)) for rank in ranks]
