"""The section on asynchronous workers: staleness of gradients, and the number of gradients per worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from markupsafe import Markup

from shoestring.show.page.drawings.drawing import Strip, strip
from shoestring.show.page.render import renderer
from shoestring.show.page.words import count_text

render = renderer("shoestring.training")
MOST = 12  # rows
NOTES = {
    True: "The correction was on: the rate of a step was divided by its staleness.",
    False: "The correction was off: a stale gradient counted as much as a fresh one.",
    None: "Only gradients of the newest weights were used; those that came too late were dropped.",
}


@dataclass(frozen=True)
class StalenessReport:
    """Gradients that moved the weights, where workers do not wait for each other (data_parallel/parameter_server/pushes.py)."""

    staleness: Mapping[int, int] = field(default_factory=dict)  # how many were computed on weights so many versions old
    applied: Mapping[int, int] = field(default_factory=dict)  # how many each worker gave,
    dropped: Mapping[int, int] = field(default_factory=dict)  # and how many of them came too late
    corrected: bool | None = None  # whether stale ones counted less; None: they were dropped


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


def staleness(told: StalenessReport) -> Markup:
    """Gradients by staleness as bars, and by worker."""
    found = sorted(told.staleness.items())
    total = sum(count for _, count in found)
    if total <= 0:
        return Markup()
    mean = sum(age * count for age, count in found) / total
    note = (
        f"{count_text(total, 'gradient')} moved the weights, computed on weights that were {mean:.1f} versions old on average and "
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
