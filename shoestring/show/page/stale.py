"""The section on workers that do not wait for each other: how old the weights were that gradients were computed on, and who gave them."""
from __future__ import annotations

from shoestring.show.page.drawing import strip
from shoestring.show.page.words import Told, counted, inner, lines, number, pairs, section, whole

MOST = 12   # rows
NOTES = {True: "The correction was on: the rate of a step was divided by its staleness.",
         False: "The correction was off: a stale gradient counted as much as a fresh one.",
         None: "Only gradients of the newest weights were used; those that came too late were dropped."}


def staleness(story: Told) -> str:
    """Gradients by staleness as bars, and by worker."""
    told = inner(inner(story, "state_of_techniques"), "pushes")
    found = sorted((int(age), count) for age, count in tallied(told, "staleness"))
    total = sum(count for _, count in found)
    if not total:
        return ""
    mean = sum(age * count for age, count in found) / total
    note = (f"{counted(int(total), 'gradient')} moved the weights, computed on weights that were {mean:.1f} versions old on average and "
            f"{found[-1][0]} at most. {correction(told.get('corrected'))}")
    rows = [(str(age), count) for age, count in found[:MOST]]
    rest = sum(count for _, count in found[MOST:])
    rows += [(f"{found[MOST][0]} or more", rest)] if rest else []
    most = max(count for _, count in rows)
    bars = [f"<div><p><span>{age}</span><b>{count:,.0f}</b></p>"
            f"{strip(f'staleness {age}: {count:,.0f}', [(0, count / most, 'gradients')])}</div>" for age, count in rows]
    return section("Staleness of gradients", note, f'<div class="gauge">\n{lines(bars)}</div>\n{workers(told)}')


def correction(on: object) -> str:
    return NOTES[on] if on is None or isinstance(on, bool) else ""


def workers(told: Told) -> str:
    applied, dropped = inner(told, "applied"), inner(told, "dropped")
    ranks = sorted({int(rank) for tally in ("applied", "dropped") for rank, _ in tallied(told, tally)})[:MOST]
    rows = [f'<tr><th scope="row">Worker {rank}</th><td>{whole(applied, str(rank)):,}</td><td>{whole(dropped, str(rank)):,}</td></tr>'
            for rank in ranks]
    head = "".join(f'<th scope="col">{name}</th>' for name in ("", "Used", "Dropped"))
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{lines(rows)}</tbody>\n</table>"


def tallied(told: Told, name: str) -> list[tuple[str, float]]:
    """The entries of a tally whose keys are whole numbers."""
    return [(str(key), count) for key, count in pairs(list(inner(told, name).items())) if str(key).isdecimal() and number(count)]
