"""The section on workers that do not wait for each other: how old the weights were that gradients were computed on, and who gave them."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from shoestring.show.page.drawing import Strip, strip
from shoestring.show.page.render import render
from shoestring.show.page.words import Entries, counted, inner, number, pairs, whole

MOST = 12  # rows
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
    used: int  # gradients
    dropped: int


def staleness(story: Entries) -> Markup:
    """Gradients by staleness as bars, and by worker."""
    told = inner(inner(story, "state_of_techniques"), "pushes")
    found = sorted((int(age), count) for age, count in tallied(told, "staleness"))
    total = sum(count for _, count in found)
    if not total:
        return Markup()
    mean = sum(age * count for age, count in found) / total
    note = (
        f"{counted(int(total), 'gradient')} moved the weights, computed on weights that were {mean:.1f} versions old on average and "
        f"{found[-1][0]} at most. {correction(told.get('corrected'))}"
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


def correction(on: object) -> str:
    return NOTES[on] if on is None or isinstance(on, bool) else ""


def workers(told: Entries) -> list[StaleWorker]:
    used, dropped = inner(told, "applied"), inner(told, "dropped")
    ranks = sorted({int(rank) for tally in ("applied", "dropped") for rank, _ in tallied(told, tally)})[:MOST]
    return [StaleWorker(rank, whole(used, str(rank)), whole(dropped, str(rank))) for rank in ranks]


def tallied(told: Entries, name: str) -> list[tuple[str, float]]:
    """The entries of a tally whose keys are whole numbers."""
    return [
        (str(key), count)
        for key, count in pairs(list(inner(told, name).items()))
        if str(key).isdecimal() and number(count)
    ]
