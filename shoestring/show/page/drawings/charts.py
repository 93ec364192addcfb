"""A line chart as a value: drawn as an SVG picture, and described as JSON to the page's script, which makes it
interactive.

Many points are reduced to few: each is the mean of neighbouring points, with their minimum and maximum, so outliers
stay visible. NaN and infinity are gaps in the picture, and null in JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, isfinite

from markupsafe import Markup

from shoestring.core.units import bytes_text
from shoestring.show.page.drawings.drawing import (
    BOTTOM,
    FRAME,
    LEFT,
    RIGHT,
    TOP,
    Curve,
    Mark,
    Plot,
    Point,
    Scale,
    along,
    groups,
    limit,
    mean,
    memory_marks,
    path_of,
    seconds_mark,
    seconds_unit,
    ticks,
    upright,
)
from shoestring.show.page.render import render
from shoestring.show.page.words import numbers, tidy

FEW, MOST = 150, 380  # points of a line in the picture, and points of the loss given to the script
MOST_BORDERS = 60  # most epoch borders shown


@dataclass(frozen=True)
class Line:
    """Values by step or by time, in order; NaN and infinity are gaps."""

    name: str
    tone: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] = ()  # minimum and maximum of the values behind each point
    high: Sequence[float | None] = ()
    dots: bool = False  # few values: each gets a dot
    best: float | None = None  # where the best value is

    def fewer(self, most: int) -> Line:
        """The same line with at most `most` points, and the best one.

        >>> line = Line("loss", "forward", [1, 2, 3, 4], [1.0, 3.0, 5.0, None]).fewer(2)
        >>> line.x, line.y, line.low, line.high
        ([2, 4], [2.0, 5.0], [1.0, 5.0], [3.0, 5.0])
        """
        if len(self.x) <= most:
            return self
        if self.dots:  # each point matters, and the best one must be kept
            kept = [place for place, x in enumerate(self.x) if place % ceil(len(self.x) / most) == 0 or x == self.best]
            return replace(self, x=[self.x[place] for place in kept], y=[self.y[place] for place in kept])
        x = [group[-1] for group in groups(self.x, most)]
        known = [numbers(group) for group in groups(self.y, most)]
        return Line(
            self.name,
            self.tone,
            x,
            [mean(group) if group else None for group in known],
            [min(group, default=None) for group in known],
            [max(group, default=None) for group in known],
            self.dots,
            self.best,
        )

    @property
    def has_values(self) -> bool:
        """Whether there is any value."""
        return any(value is not None and isfinite(value) for value in self.y)

    @property
    def points(self) -> list[Point]:
        return [(x, y) for x, y in zip(self.x, self.y, strict=True) if y is not None and isfinite(y)]

    def as_json(self) -> str:
        bands = f',"low":{listed_json(self.low, 4)},"high":{listed_json(self.high, 4)}' if self.low else ""
        best = f',"best":{json.dumps(self.best)}' if self.best is not None else ""
        words = json.dumps({"name": self.name, "tone": self.tone, "dots": self.dots})[:-1]
        return f'{words},"x":{listed_json(self.x, 9)},"y":{listed_json(self.y)}{bands}{best}}}'


def listed_json(values: Sequence[float | None], digits: int = 5) -> str:
    """Numbers as a short JSON list; null for NaN, infinity and None.

    >>> listed_json([1, 0.123456789, None, float("nan"), 1e7])
    '[1,0.12346,null,null,1e+07]'
    """
    form = f"%.{digits}g"
    return "[" + ",".join([form % value if value is not None and isfinite(value) else "null" for value in values]) + "]"


@dataclass(frozen=True)
class Chart:
    key: str  # identifies the chart in the script
    title: str
    note: str
    lines: tuple[Line, ...]
    across: str = "step"  # the x axis: step, round or time
    unit: str = ""  # the y axis: "" (a number), "bytes", or a word such as steps/s
    rows: str = ""  # name of the values
    zero: bool = False  # the y axis starts at zero
    span: tuple[float, float] | None = None  # the least range of the x axis
    named: bool = False  # the line has a legend even if it is the only one
    tools: bool = False  # offers a logarithmic scale and smoothing
    borders: Sequence[Sequence[float]] = ()  # [step, completed epochs]
    budget: float | None = (
        None  # a horizontal line; for bytes it is shown if it leaves most of the plot to the values, else always
    )

    def draw(self, template: str = "chart.html") -> Markup:
        """The picture, and the script's data; empty if there are no values."""
        if not any(line.has_values for line in self.lines):
            return Markup()
        legend = [(line.tone, line.name) for line in self.lines] if len(self.lines) > 1 or self.named else []
        return render(
            template,
            title=self.title,
            note=self.note,
            plot=self.plot,
            legend=legend,
            frame=FRAME,
            data=self.as_json(),
            tall=self.tools or self.named,
        )

    def as_json(self) -> str:
        told = {
            "key": self.key,
            "title": self.title,
            "across": self.across,
            "unit": self.unit,
            "zero": self.zero,
            "tools": self.tools,
            "span": self.span,
            "named": self.named,
            "budget": self.budget,
            "borders": [list(border) for border in evenly(self.borders, MOST_BORDERS)],
        }
        few = [line.fewer(MOST) if self.tools else replace(line.fewer(FEW), low=(), high=()) for line in self.lines]
        lines = ",".join(line.as_json() for line in few)
        return json.dumps(told, separators=(",", ":"), allow_nan=False)[:-1] + f',"lines":[{lines}]}}'

    @property
    def plot(self) -> Plot:
        lines = [line.fewer(FEW) for line in self.lines if line.has_values]
        values = [value for line in lines for _, value in line.points]
        last = max([line.x[-1] for line in lines] + list(self.span or ()))
        first = 0.0 if self.across == "time" else min([line.x[0] for line in lines] + list(self.span or ()))
        x, (marks, text) = Scale(first, last, LEFT, RIGHT), self.marks(min(values), max(values))
        y = Scale(marks[0], marks[-1], BOTTOM, TOP)
        return Plot(
            f"{self.title}. {self.note}",
            upright(marks, y, text),
            self.rows or self.title.lower(),
            self.below(x),
            self.across,
            tuple(curve(line, x, y) for line in lines),
            tuple(x(step) for step, _ in evenly(self.borders, MOST_BORDERS) if first <= step <= last),
            limit=limit(self.budget, y) if self.unit == "bytes" else limit(self.budget, y, "{:,.6g}".format, "start"),
        )

    def marks(self, low: float, high: float) -> tuple[list[float], Callable[[float], str]]:
        """The values on the y axis, and their text."""
        if self.unit == "bytes":
            return memory_marks(high, self.budget), bytes_mark
        low, high = min(0.0, low) if self.zero else low, max(high, self.budget or high)
        return ticks(low, high), "{:,.6g}".format if self.unit else "{:.6g}".format

    def below(self, x: Scale) -> tuple[Mark, ...]:
        if self.across == "time":
            unit = seconds_unit(x.high)
            return along(
                [mark for mark in ticks(0, x.high, unit) if mark <= x.high], x, lambda time: seconds_mark(time, unit)
            )
        marks = [x.low] + [mark for mark in ticks(0, x.high) if x.low < mark <= x.high and mark == int(mark)]
        return along(marks, x, lambda mark: f"{mark:,.0f}")


def bytes_mark(size: float) -> str:
    return tidy(bytes_text(size))


def curve(line: Line, x: Scale, y: Scale) -> Curve:
    points = line.points
    dots = points if line.dots and len(points) <= 60 else points[-1:]
    best = next(((x(place), y(value)) for place, value in points if place == line.best), None)
    return Curve(path_of(points, x, y), tuple((x(place), y(value)) for place, value in dots), line.tone, best)


def evenly(found: Sequence[Sequence[float]], most: int) -> Sequence[Sequence[float]]:
    """Every second, third, ... item, so that at most `most` remain."""
    return found[:: ceil(len(found) / most) or 1]
