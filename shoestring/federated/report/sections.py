"""The sections of a federated run: participants, traffic, privacy, and missing or rejected devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from markupsafe import Markup

from shoestring.core.units import bytes_text
from shoestring.federated.events import RoundFinished
from shoestring.federated.playing.fold import FederationReport
from shoestring.runs.reports.report import Report
from shoestring.show.page.drawings.charts import Chart, Line
from shoestring.show.page.render import NONE, renderer
from shoestring.show.page.words import count_text, loss_text, numbers, share_text, short

render = renderer("shoestring.federated")
MOST_ROWS, MOST_METRICS, MOST_NAME = 12, 3, 30  # limits that keep the page small


def round_line(
    own: FederationReport,
    told: Callable[[RoundFinished], float | None],
    shown: str = "",
    tone: str = "",
    summed: bool = False,
) -> Line:
    """A value for every round; `summed`: cumulative."""
    values = [told(one) for one in own.rounds]
    return Line(
        shown,
        tone,
        [one.step for one in own.rounds],
        list(accumulate(value or 0.0 for value in values)) if summed else values,
    )


@dataclass(frozen=True)
class Privacy:
    """Epsilon spent, and the budget."""

    spent: float
    budget: float | None  # None: no budget was given
    delta: float | None
    in_all: float | None = None  # spent by all runs on the ledger; None: no other run
    seeded: bool = False  # the noise follows from a seed

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


def privacy(own: FederationReport) -> Privacy | None:
    """None if nothing is private, or nothing is known yet."""
    spent, asked = [one for one in own.rounds if one.epsilon is not None], own.asked
    if not spent or spent[-1].epsilon is None:
        return None
    return Privacy(spent[-1].epsilon, asked.epsilon, asked.delta, spent[-1].epsilon_in_all, own.private is False)


def how_federated(own: FederationReport, ended: str = "") -> str:
    """The end of the sentence about the run's result: why it ended early, participants, and the privacy spent.

    >>> from shoestring.federated.options import FederateOptions
    >>> asked = FederateOptions(per_round=50, clients=1000, epsilon=4.0)
    >>> how_federated(FederationReport(asked, (RoundFinished(step=1, participants=50, epsilon=2.0),)))
    ', each with 50 of 1,000 clients; epsilon 2.000 of 4 is spent'
    """
    some, of, spent = own.asked.per_round, own.asked.clients, privacy(own)
    who = f", each with {some:,} of {of:,} clients" if some and of else ""
    if ended and spent and "epsilon" in ended:
        return f": {spent.text}"
    return (f": {ended}" if ended else who) + (f"; {spent.text}" if spent else "")


def charts(own: FederationReport, report: Report) -> list[Markup]:
    """By round: participants, epsilon spent, bytes up and down, metrics on devices, and simulated time."""
    found = [participants(own), epsilon(own), traffic(own, report), *on_devices(own), simulated_time(own)]
    return [one for one in found if one]


def participants(own: FederationReport) -> Markup:
    """Devices that took part, were missing or were rejected."""
    took = round_line(own, lambda one: one.participants, "took part", "update")
    others = [
        round_line(own, lambda one: one.missing, "missing", "temporaries"),
        round_line(own, lambda one: len(one.rejected), "turned away", "alert"),
    ]
    known, note = numbers(took.y), ""
    if known:
        mean = sum(known) / len(known)
        note = f"{count_text(int(known[-1]), 'device')} in the last round, {mean:,.1f} a round on average."
    for count, said in ((own.missing, "missing"), (len(own.rejections), "turned away")):
        note += f" {count:,} {'was' if count == 1 else 'were'} {said} in all." if count else ""
    lines = (took, *(line for line in others if line.has_values))
    return Chart("participants", "Participants", note, lines, "round", rows="devices", zero=True, named=True).draw()


def epsilon(own: FederationReport) -> Markup:
    """Epsilon spent so far and its budget."""
    line, spent = round_line(own, lambda one: one.epsilon, "epsilon spent", "optimizer"), privacy(own)
    if spent is None:
        return Markup()
    left = "" if spent.budget is None or spent.over else f", {loss_text(spent.budget - spent.spent)} is left"
    at = "" if spent.delta is None else f" at delta {short(spent.delta)}"
    note = f"{spent.text[:1].upper()}{spent.text[1:]}{at}{left}."
    note += " It is about the weights: losses and metrics here are what the simulation sees."
    return Chart(
        "epsilon", "Privacy", note, (line,), "round", rows="epsilon", zero=True, named=True, budget=spent.budget
    ).draw()


def traffic(own: FederationReport, report: Report) -> Markup:
    """Bytes that all devices sent and received so far."""
    lines = (
        round_line(own, lambda one: one.up, "up", "forward", summed=True),
        round_line(own, lambda one: one.down, "down", "backward", summed=True),
    )
    note = f"All devices together: {bytes_text(own.up)} up and {bytes_text(own.down)} down." if own.rounds else ""
    for name, does, most in (("up", "sends", own.asked.upload), ("down", "is given", own.asked.download)):
        one = report.measured.get(f"{name}_bytes")
        if one is not None:
            of = "" if most is None else f", {'of' if one <= most else 'above the'} {bytes_text(most)} that it may"
            note += f" A device {does} {bytes_text(one)} a round{of}."
    rows = "all devices, so far"
    return Chart("traffic", "Bytes up and down", note, lines, "round", "bytes", rows, zero=True, named=True).draw()


def on_devices(own: FederationReport) -> Iterator[Markup]:
    """Held-out metrics on devices, before and after their own training."""
    told = [one for one in own.rounds if one.before or one.after]
    for name in list(dict.fromkeys(name for one in told for name in (*(one.before or {}), *(one.after or {}))))[
        :MOST_METRICS
    ]:
        steps = [one.step for one in told]
        lines = (
            Line("before", "other", steps, [(one.before or {}).get(name) for one in told], dots=True),
            Line("after", "update", steps, [(one.after or {}).get(name) for one in told], dots=True),
        )
        last = [f"{loss_text(line.points[-1][1])} {line.name}" for line in lines if line.has_values]
        shown = name[:MOST_NAME]
        yield Chart(
            f"devices {name}"[:80],
            f"{shown[:1].upper()}{shown[1:]} on devices",
            f"On what devices hold out: {', '.join(last)} their own work, at the last time." if last else "",
            lines,
            "round",
            rows=shown,
            named=True,
        ).draw()


def simulated_time(own: FederationReport) -> Markup:
    """Simulated time of the rounds, for devices of different speeds."""
    line = round_line(own, lambda one: one.simulated, "a round", "buffers")
    known = numbers(line.y)
    mean = f"{loss_text(sum(known) / len(known))} a round on average, {sum(known):,.4g} in all" if known else ""
    note = f"In units of a usual device's work: {mean}."
    return Chart("simulated", "Simulated time", note, (line,), "round", rows="usual device's work", zero=True).draw()


@dataclass(frozen=True)
class Away:
    """A missing device."""

    name: str
    rounds: int
    share: str  # fraction of all rounds


def tables(own: FederationReport) -> list[Markup]:
    """Missing and rejected devices, by name."""
    return [one for one in (missing(own), rejections_section(own)) if one]


def missing(own: FederationReport) -> Markup:
    found, many = own.away, len(own.rounds)
    rows = [Away(name, count, share_text(count / many)) for name, count in found[:MOST_ROWS]]
    note = f"Devices did not answer {count_text(own.missing, 'time')} in all. " if own.missing else ""
    note += "Most often, of those whose names were noted:"
    return render("missing.html", note=note, rows=rows, more=len(found) - len(rows)) if rows else Markup()


def rejections_section(own: FederationReport) -> Markup:
    found = own.rejections
    rows = [(f"{number:,}", name, why or NONE) for number, name, why in found[: -MOST_ROWS - 1 : -1]]
    went_on = f"the round went on without {'it' if len(found) == 1 else 'them'}"
    note = f"{count_text(len(found), 'update')} could not be used; {went_on}."
    note += f" The newest {len(rows)}:" if len(found) > len(rows) else ""
    return render("turned_away.html", note=note, rows=rows) if rows else Markup()
