"""The sections of a federated run: who took part, what was sent, what privacy it cost, and who was missing or turned away.

All of it is in the report's `federated`, in columns by round (federated/fold.py); any column may be missing, shorter or damaged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from markupsafe import Markup

from shoestring.core.units import bytes_text
from shoestring.show.page.charts import Chart, Line
from shoestring.show.page.render import NONE, renderer
from shoestring.show.page.words import (
    Entries,
    all_numbers,
    counted,
    dicts,
    inner,
    listed,
    loss_text,
    number,
    numbers,
    share_text,
    short,
    whole,
)

render = renderer("shoestring.federated")
MOST_ROWS, MOST_METRICS, MOST_NAME = 12, 3, 30  # what keeps the page small


def column(story: Entries, name: str) -> list[float | None]:
    """What every round came to; None where it is not known."""
    return [number(value) for value in listed(inner(story, "federated").get(name))]


def rounds_of(story: Entries) -> list[int]:
    """The numbers of the rounds that the columns are of; empty where they are damaged."""
    found = listed(inner(story, "federated").get("round"))
    return [int(one) for one in found] if all_numbers(found) else []


def round_line(story: Entries, name: str, shown: str, tone: str, summed: bool = False) -> Line:
    """A column by round; `summed` up to each round."""
    values, rounds = column(story, name), rounds_of(story)
    rounds = rounds if len(rounds) >= len(values) else list(range(1, len(values) + 1))
    return Line(
        shown, tone, rounds[: len(values)], list(accumulate(value or 0.0 for value in values)) if summed else values
    )


def last_of(story: Entries, name: str) -> float | None:
    """Of the last round in which it is known."""
    return next((value for value in reversed(column(story, name)) if value is not None), None)


def total(story: Entries, key: str, name: str) -> float | None:
    """A sum over all rounds: as the report tells it, else that of the column; None if neither is known."""
    told, known = number(inner(story, "federated").get(key)), numbers(listed(inner(story, "federated").get(name)))
    return told if told is not None else sum(known) if known else None


def asked_for(story: Entries, name: str) -> float | None:
    return number(inner(inner(story, "federated"), "asked").get(name))


@dataclass(frozen=True)
class Privacy:
    """Epsilon that is spent, and what there is to spend."""

    spent: float
    budget: float | None  # None: none was given
    delta: float | None
    in_all: float | None = None  # by all runs on the ledger; None: there is no other
    seeded: bool = False  # noise follows from a seed

    @property
    def over(self) -> bool:
        return self.budget is not None and self.spent > self.budget

    @property
    def text(self) -> str:
        """
        >>> Privacy(3.6181, 4.0, 1e-6).text, Privacy(4.5, 4.0, None).text, Privacy(4.5, None, None).text
        ('epsilon 3.618 of 4 is spent', 'epsilon 4.500 is spent, above the budget of 4', 'epsilon 4.500 is spent')
        >>> Privacy(3.6181, 4.0, 1e-6, 6.5).text, Privacy(3.6, 4.0, None, seeded=True).text
        ('epsilon 3.618 of 4 is spent, 6.500 with other runs on the same ledger', 'NOT PRIVATE: noise follows from a seed')
        """
        if self.seeded:
            return "NOT PRIVATE: noise follows from a seed"
        others = "" if self.in_all is None else f", {loss_text(self.in_all)} with other runs on the same ledger"
        if self.over:
            return f"epsilon {loss_text(self.spent)} is spent, above the budget of {self.budget:g}{others}"
        return (
            f"epsilon {loss_text(self.spent)}{'' if self.budget is None else f' of {self.budget:g}'} is spent{others}"
        )


def privacy(story: Entries) -> Privacy | None:
    """None where nothing is private, or nothing is known yet."""
    spent = last_of(story, "epsilon")
    seeded = inner(story, "federated").get("private") is False
    budget, delta, in_all = asked_for(story, "epsilon"), asked_for(story, "delta"), last_of(story, "epsilon_in_all")
    return None if spent is None else Privacy(spent, budget, delta, in_all, seeded)


def how_federated(story: Entries, ended: str = "") -> str:
    """The end of the sentence on how it went: why it ended if not by its rounds, who took part, and the privacy it cost.

    >>> how_federated({"federated": {"asked": {"per_round": 50, "clients": 1000, "epsilon": 4}, "epsilon": [1.0, 2.0]}})
    ', each with 50 of 1,000 clients; epsilon 2.000 of 4 is spent'
    """
    some, of, spent = asked_for(story, "per_round"), asked_for(story, "clients"), privacy(story)
    who = f", each with {some:,.0f} of {of:,.0f} clients" if some and of else ""
    if ended and spent and "epsilon" in ended:
        return f": {spent.text}"
    return (f": {ended}" if ended else who) + (f"; {spent.text}" if spent else "")


def charts(story: Entries) -> list[Markup]:
    """By round: who took part, the privacy that is spent, bytes up and down, metrics on devices, and simulated time."""
    found = [participants(story), epsilon(story), traffic(story), *on_devices(story), simulated(story)]
    return [one for one in found if one]


def participants(story: Entries) -> Markup:
    """Devices whose updates were used, were missing or were turned away."""
    took = round_line(story, "participants", "took part", "update")
    others = [
        round_line(story, "missing", "missing", "temporaries"),
        round_line(story, "rejected", "turned away", "alert"),
    ]
    known = numbers(list(took.y))
    note = (
        f"{counted(int(known[-1]), 'device')} in the last round, {sum(known) / len(known):,.1f} a round on average."
        if known
        else ""
    )
    for name, key, said in (("missing", "missed", "missing"), ("rejected", "turned", "turned away")):
        count = total(story, key, name)
        note += f" {count:,.0f} {'was' if count == 1 else 'were'} {said} in all." if count else ""
    return Chart(
        "participants",
        "Participants",
        note.strip(),
        (took, *(line for line in others if any(numbers(list(line.y))))),
        "round",
        rows="devices",
        zero=True,
        named=True,
    ).drawn()


def epsilon(story: Entries) -> Markup:
    """The privacy loss so far against its budget."""
    line, spent = round_line(story, "epsilon", "epsilon spent", "optimizer"), privacy(story)
    if spent is None:
        return Markup()
    left = "" if spent.budget is None or spent.over else f", {loss_text(spent.budget - spent.spent)} is left"
    at = "" if spent.delta is None else f" at delta {short(spent.delta)}"
    note = f"{spent.text[:1].upper()}{spent.text[1:]}{at}{left}."
    note += " It is about the weights: losses and metrics here are what the simulation sees."
    return Chart(
        "epsilon", "Privacy", note, (line,), "round", rows="epsilon", zero=True, named=True, budget=spent.budget
    ).drawn()


def traffic(story: Entries) -> Markup:
    """Bytes that all devices sent and were given so far."""
    lines = [
        round_line(story, name, shown, tone, summed=True)
        for name, shown, tone in (("up", "up", "forward"), ("down", "down", "backward"))
    ]
    told = [
        f"{bytes_text(size)} {name}"
        for name in ("up", "down")
        if (size := total(story, f"bytes_{name}", name)) is not None
    ]
    note = f"All devices together: {' and '.join(told)}." if told else ""
    for name, does, budget in (("up", "sends", "upload"), ("down", "is given", "download")):
        one, most = number(inner(story, "measured").get(f"{name}_bytes")), asked_for(story, budget)
        if one is not None:
            of = "" if most is None else f", {'of' if one <= most else 'above the'} {bytes_text(most)} that it may"
            note += f" A device {does} {bytes_text(one)} a round{of}."
    return Chart(
        "traffic",
        "Bytes up and down",
        note.strip(),
        tuple(lines),
        "round",
        "bytes",
        "all devices, so far",
        zero=True,
        named=True,
    ).drawn()


def on_devices(story: Entries) -> Iterator[Markup]:
    """Every metric on what devices hold out, before their own work and after it."""
    told = {when: dicts(inner(story, "federated").get(when)) for when in ("before", "after")}
    names = dict.fromkeys(
        name for found in told.values() for one in found for name in one if name != "round" and isinstance(name, str)
    )
    for name in list(names)[:MOST_METRICS]:
        lines = [
            metric_line(found, name, when, tone)
            for (when, found), tone in zip(told.items(), ("other", "update"), strict=True)
        ]
        last = [f"{loss_text(points[-1][1])} {line.name}" for line in lines if (points := line.points)]
        shown = name[:MOST_NAME]
        yield Chart(
            f"devices {name}"[:80],
            f"{shown[:1].upper()}{shown[1:]} on devices",
            f"On what devices hold out: {', '.join(last)} their own work, at the last time." if last else "",
            tuple(lines),
            "round",
            rows=shown,
            named=True,
        ).drawn()


def metric_line(found: list[Entries], name: str, when: str, tone: str) -> Line:
    known = [one for one in found if number(one.get("round")) is not None]
    return Line(when, tone, [one["round"] for one in known], [number(one.get(name)) for one in known], dots=True)


def simulated(story: Entries) -> Markup:
    """How long the rounds would take devices of different speeds."""
    line = round_line(story, "simulated", "a round", "buffers")
    known = numbers(list(line.y))
    mean = f"{loss_text(sum(known) / len(known))} a round on average, {sum(known):,.4g} in all" if known else ""
    note = f"In units of a usual device's work: {mean}."
    return Chart("simulated", "Simulated time", note, (line,), "round", rows="usual device's work", zero=True).drawn()


@dataclass(frozen=True)
class Away:
    """A device that was missing."""

    name: str
    rounds: int
    share: str  # of all rounds


def tables(story: Entries) -> list[Markup]:
    """Who was missing and who was turned away, by name."""
    return [one for one in (missing(story), turned_away(story)) if one]


def missing(story: Entries) -> Markup:
    found, many = dicts(inner(story, "federated").get("away")), len(listed(inner(story, "federated").get("round")))
    rows = [
        Away(
            str(one.get("name", NONE)), whole(one, "rounds"), share_text(whole(one, "rounds") / many) if many else NONE
        )
        for one in found[:MOST_ROWS]
    ]
    count = total(story, "missed", "missing")
    note = f"Devices did not answer {count:,.0f} time{'s' * (count != 1)} in all. " if count else ""
    note += "Most often, of those whose names were noted:"
    return render("missing.html", note=note, rows=rows, more=len(found) - len(rows)) if rows else Markup()


def turned_away(story: Entries) -> Markup:
    found = dicts(inner(story, "federated").get("turned_away"))
    rows = [
        (f"{whole(one, 'round'):,}", one.get("name", NONE), one.get("why") or NONE)
        for one in found[: -MOST_ROWS - 1 : -1]
    ]
    count = total(story, "turned", "rejected") or len(rows)
    note = f"{counted(int(count), 'update')} could not be used; the round went on without {'it' if count == 1 else 'them'}."
    note += f" The newest {len(rows)}:" if count > len(rows) else ""
    return render("turned_away.html", note=note, rows=rows) if rows else Markup()
