"""Drawings as values: positions that the templates plot.html and macros.html turn into SVG.

A plot is 440 units wide, so that its text stays readable on a phone and on half a desktop window. Colours are classes
(`tone-forward`), never style attributes: the live page's policy forbids inline style.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor, log, log10
from typing import TypeVar

from shoestring.core.units import bytes_text

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 440, 240, 76, 428, 30, 204  # size of the drawing, and the plot inside it
FRAME = {"WIDTH": WIDTH, "HEIGHT": HEIGHT, "LEFT": LEFT, "RIGHT": RIGHT, "TOP": TOP, "BOTTOM": BOTTOM}
MOST_POINTS = 240
SMALLEST = 1e-300  # step between two marks
Point = tuple[float, float]  # position, value
T = TypeVar("T")


@dataclass(frozen=True)
class Mark:
    """A value on an axis, or a line across the plot."""

    at: float
    text: str
    anchor: str = "middle"


@dataclass(frozen=True)
class Curve:
    """A line through points, with a dot at its end or at each point, and a ring around the best."""

    path: str
    dots: tuple[Point, ...]
    tone: str
    best: Point | None = None


@dataclass(frozen=True)
class Bar:
    x: str
    y: float
    width: str
    height: str
    tone: str
    name: str
    text: str


@dataclass(frozen=True)
class Plot:
    label: str  # for screen readers
    rows: tuple[Mark, ...]  # grid lines with their values
    rows_name: str
    columns: tuple[Mark, ...]  # values below the plot
    columns_name: str
    curves: tuple[Curve, ...] = ()
    borders: tuple[float, ...] = ()  # positions of vertical lines: the ends of epochs
    bars: tuple[Bar, ...] = ()
    limit: Mark | None = None  # the budget


@dataclass(frozen=True)
class BarSpan:
    x: str
    width: str
    tone: str


@dataclass(frozen=True)
class Strip:
    """A flat bar made of spans, with a mark on it."""

    label: str
    spans: tuple[BarSpan, ...]
    mark: str = ""


@dataclass(frozen=True)
class Scale:
    """Maps values to positions: low to `start`, high to `end`."""

    low: float
    high: float
    start: float
    end: float

    @property
    def line(self) -> Point:
        """The position of zero and the length of one unit; if low equals high, everything is in the middle."""
        slope = (self.end - self.start) / (self.high - self.low) if self.high > self.low else 0.0
        return (self.start - self.low * slope if slope else (self.start + self.end) / 2), slope

    def __call__(self, value: float) -> float:
        zero, slope = self.line
        return round(zero + slope * value, 1)


def ticks(low: float, high: float, unit: float = 1.0) -> list[float]:
    """Three to six round values that enclose low and high; round in multiples of `unit`.

    >>> ticks(0, 37), ticks(2.3, 5.5)
    ([0.0, 10.0, 20.0, 30.0, 40.0], [2.0, 3.0, 4.0, 5.0, 6.0])
    """
    raw = max(((high - low) or abs(high) or 1.0) / 4 / unit, SMALLEST)
    digit = floor(log10(raw))
    power = 10.0**digit
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if power * factor >= raw * 0.999)
    first, last = floor(low / unit / step + 1e-9), ceil(high / unit / step - 1e-9)
    return [unit * round(step * count, 1 - digit) for count in range(first, max(last, first + 1) + 1)]


def bytes_unit(top: float) -> float:
    return float(1024 ** min(3, int(log(max(top, 1.0), 1024))))


def seconds_unit(top: float) -> float:
    return 3600.0 if top > 7200 else 60.0 if top > 120 else 1.0


def seconds_mark(time: float, unit: float) -> str:
    """
    >>> seconds_mark(120, 60), seconds_mark(0.5, 1), seconds_mark(0, 60)
    ('2 min', '0.5 s', '0')
    """
    return f"{time / unit:g} { {3600.0: 'h', 60.0: 'min'}.get(unit, 's') }" if time else "0"


def memory_marks(top: float, budget: float | None) -> list[float]:
    """Ticks from zero, including the budget if that leaves most of the plot to the figures."""
    top = max(top, budget) if budget is not None and budget <= 1.7 * top else top
    return ticks(0, max(top, 1.0), bytes_unit(top))


def groups(found: Sequence[T], most: int = MOST_POINTS) -> list[Sequence[T]]:
    """Consecutive items in at most `most` groups."""
    size = ceil(len(found) / most) or 1
    return [found[start : start + size] for start in range(0, len(found), size)]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)  # statistics.fmean takes five times as long


def upright(marks: Sequence[float], y: Scale, text: Callable[[float], str]) -> tuple[Mark, ...]:
    """Grid lines with their values."""
    return tuple(Mark(y(mark), text(mark)) for mark in marks)


def along(marks: Sequence[float], x: Scale, text: Callable[[float], str]) -> tuple[Mark, ...]:
    """Values below the plot; those at the ends stay inside."""
    places = [(mark, x(mark)) for mark in marks]
    return tuple(
        Mark(at, text(mark), "start" if at < LEFT + 8 else "end" if at > RIGHT - 12 else "middle")
        for mark, at in places
    )


def limit(
    budget: float | None, y: Scale, text: Callable[[float], str] = bytes_text, anchor: str = "end"
) -> Mark | None:
    """The budget as a line, if it lies in the plot. Its text is at the end of the line, or at the start if a rising
    curve ends there."""
    inside = budget is not None and y.low <= budget <= y.high
    return Mark(y(budget), f"budget {text(budget)}", anchor) if inside and budget is not None else None


def path_of(points: Sequence[Point], x: Scale, y: Scale) -> str:
    (left, right), (base, up) = x.line, y.line
    return " ".join([f"{left + right * place:.1f},{base + up * value:.1f}" for place, value in points])


def strip(label: str, spans: Iterable[tuple[float, float, str]], mark: float | None = None) -> Strip:
    """A flat bar from 0 to 1 made of (from, to, tone), and a mark on it."""
    drawn = tuple(
        BarSpan(f"{1000 * start:.1f}", f"{max(0.0, 1000 * (end - start)):.1f}", tone) for start, end, tone in spans
    )
    return Strip(label, drawn, "" if mark is None else f"{1000 * mark:.1f}")
