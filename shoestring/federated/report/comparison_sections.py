"""A/B tables: run 1 against run 2, by metric and group, each with the difference in percent and its interval.

The interval is drawn beside its numbers: if it does not cross the line at zero, the two differ. All rows of a table
have the same scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from markupsafe import Markup

from shoestring.federated.playing.fold import ABRow, FederationReport
from shoestring.show.page.drawings.curves import known_text
from shoestring.show.page.render import NONE, renderer

render = renderer("shoestring.federated")
MOST_TABLES, MOST_ROWS = 6, 60  # over all tables; keeps the page small
WIDTH, MIDDLE, EDGE = 200.0, 100.0, 6.0  # of the picture of an interval; zero is in its middle
WIDEST = (
    3.0  # intervals wider than this many times the median are cut, so that one small group does not squeeze all others
)


@dataclass(frozen=True)
class IntervalPicture:
    """Positions in the picture of an interval."""

    label: str
    x: str
    width: str
    at: str  # of the estimate; empty: outside of the picture
    tone: str


@dataclass(frozen=True)
class ComparisonRow:
    metric: str
    group: str
    one: str
    other: str
    delta: str
    span: str  # the interval as text
    devices: str
    verdict: str
    tone: str
    interval: IntervalPicture | None


def comparisons(own: FederationReport) -> list[Markup]:
    """A section for every comparison that has a row."""
    drawn, left = [], MOST_ROWS
    for table in own.comparisons[:MOST_TABLES]:
        most = scale_of(table.rows)
        rows = [row_of(one, most) for one in table.rows[:left]]
        left -= len(rows)
        if rows:
            reach = f"The pictures reach to {most:,.2g} % on either side." if any(row.interval for row in rows) else ""
            more = len(table.rows) - len(rows)
            drawn.append(render("comparisons.html", title=table.title, reach=reach, rows=rows, more=more))
    return drawn


def scale_of(found: Sequence[ABRow]) -> float:
    """Percent from the middle of the pictures to their edges."""
    ends = [max(abs(one.low), abs(one.high)) for one in found if one.low is not None and one.high is not None]
    return (min(max(ends), WIDEST * median(ends)) if ends else 0.0) or 1.0


def row_of(one: ABRow, most: float) -> ComparisonRow:
    delta, low, high, tone = one.delta_percent, one.low, one.high, tone_of(one.verdict)
    return ComparisonRow(
        one.metric,
        one.group,
        known_text(one.one),
        known_text(one.other),
        NONE if delta is None else f"{percent(delta)} %",
        f"{percent(low)} to {percent(high)}" if low is not None and high is not None else "",
        NONE if one.devices is None else f"{one.devices:,}",
        one.verdict,
        tone,
        interval(delta, low, high, most, tone),
    )


def percent(value: float) -> str:
    """
    >>> percent(1.234), percent(-12.34), percent(0.0), percent(1234.5)
    ('+1.23', '-12.3', '0.00', '+1,234')
    """
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:+,.{digits}f}" if round(value, digits) else f"{0.0:.{digits}f}"


def tone_of(verdict: str) -> str:
    """The colour of a verdict; neutral if there is no difference.

    >>> tone_of("worse"), tone_of("Better by 2 %"), tone_of("no difference seen")
    ('alert', 'update', 'other')
    """
    first = verdict.lower().split(" ")[0].strip(".,:;")
    return {"worse": "alert", "better": "update"}.get(first, "other")


def interval(
    delta: float | None, low: float | None, high: float | None, most: float, tone: str
) -> IntervalPicture | None:
    """
    >>> interval(1.0, 0.0, 2.0, 2.0, "other")
    IntervalPicture(label='+1.00 %, from 0.00 to +2.00 %', x='100.0', width='94.0', at='147.0', tone='other')
    """
    if low is None or high is None:
        return None
    low, high = min(low, high), max(low, high)
    start, end = place(low, most), place(high, most)
    label = f"{'' if delta is None else f'{percent(delta)} %, '}from {percent(low)} to {percent(high)} %"
    at = "" if delta is None or abs(delta) > most else f"{place(delta, most):.1f}"
    return IntervalPicture(label, f"{start:.1f}", f"{max(1.5, end - start):.1f}", at, tone)


def place(value: float, most: float) -> float:
    """The position of a percentage; beyond the scale, the edge of the picture."""
    if abs(value) > most:
        return WIDTH if value > 0 else 0.0
    return MIDDLE + (MIDDLE - EDGE) * value / most
