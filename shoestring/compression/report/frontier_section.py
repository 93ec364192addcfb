"""The frontier of a compression as a plot: what is possible, what was chosen and measured, and what was requested.

    x   size; logarithmic if the largest is more than five times the smallest
    y   damage, 1 - fidelity, logarithmic; the lowest line is no damage. If nothing has damage: fidelity itself

Labels in the plot are put where they cover no other label, and no line if there is room; the legend has everything as
well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, floor, log10
from operator import attrgetter

from shoestring.compression.report.amounts import (
    UNITS,
    asked_share_text,
    asked_size_text,
    share_text,
    size_text,
    time_text,
)
from shoestring.compression.report.compress_report import Amount, CompressReport, FrontierPoint
from shoestring.show.page.drawings.drawing import BOTTOM, LEFT, RIGHT, TOP, Mark, Point, Scale, ticks

MOST_POINTS, MOST_MARKS = 120, 6
PREDICTED, MEASURED = attrgetter("predicted"), attrgetter("measured")
NO_DAMAGE, HUGE = 1e-9, 1e18  # smaller damages are rounding of float32; larger figures are no sizes or damages
STEP = 6.0  # length of the boxes along a line
WIDE = 5.0  # ratio from which on the size axis is logarithmic
LETTER, LINE = 9.0, 17.0  # size of the plot's labels, which are bold, on a phone, where they are largest
NEAR = (
    (11, -9, "start"),
    (11, -25, "start"),
    (11, 20, "start"),
    (0, -14, "middle"),
    (11, -41, "start"),
    (11, 36, "start"),
)
FAR = ((-11, 20, "end"), (-11, -9, "end"), (-11, 36, "end"), (0, 25, "middle"), (-11, -25, "end"))


@dataclass(frozen=True)
class Reached:
    """A point with its size and damage, and its text."""

    size: float
    damage: float
    text: str = ""
    place: Point = (0.0, 0.0)


@dataclass(frozen=True)
class Word:
    text: str
    x: float
    y: float
    anchor: str
    tone: str


@dataclass(frozen=True)
class PlotAxis:
    scale: Scale
    logarithmic: bool
    marks: tuple[tuple[float, str], ...]

    def __call__(self, value: float) -> float:
        """The position of a value; values too small for a logarithm are at the end of the axis."""
        if not self.logarithmic:
            return self.scale(value)
        return self.scale(max(self.scale.low, log10(value)) if value > 0 else self.scale.low)


@dataclass(frozen=True)
class Frontier:
    label: str
    note: str
    path: str
    dots: tuple[Reached, ...]
    rows: tuple[Mark, ...]
    rows_name: str
    columns: tuple[Mark, ...]
    columns_name: str
    markers: tuple[tuple[str, Reached], ...]  # (predicted or measured, position)
    across: tuple[tuple[str, float], ...]  # (x or y, position) of requested limits
    words: tuple[Word, ...]
    legend: tuple[tuple[str, str], ...]  # (kind, text)


def frontier(report: CompressReport) -> Frontier | None:
    """None if there is nothing to draw."""
    told = report.frontier
    found = sorted((one for entry in told if (one := mark_of(entry)) is not None), key=lambda one: one.size)
    amounts = {"predicted": chosen_point(report, PREDICTED), "measured": chosen_point(report, MEASURED)}
    chosen = {kind: one for kind, one in amounts.items() if one is not None}
    if not found and not chosen:
        return None
    few = found[:: ceil(len(found) / MOST_POINTS) or 1]
    few += found[-1:] if found and few[-1] is not found[-1] else []
    asked, points = requested_limits(report), [*few, *chosen.values()]
    unit, x = size_axis([*(one.size for one in points), *([asked["size"]] if "size" in asked else [])])
    of, y = damage_axis([*(one.damage for one in points), *([asked["damage"]] if "damage" in asked else [])])

    def with_place(one: Reached) -> Reached:
        return replace(one, place=(x(one.size), y(one.damage)))

    dots, markers = tuple(map(with_place, few)), {kind: with_place(one) for kind, one in chosen.items()}
    across = {name: (x if name == "size" else y)(value) for name, value in asked.items()}
    return Frontier(
        label_of(found, chosen),
        note_of(len(told) - len(found), x, y),
        " ".join(f"{one.place[0]},{one.place[1]}" for one in dots),
        dots,
        tuple(Mark(y(value), text) for value, text in y.marks),
        of,
        columns(x),
        f"size in {unit}",
        tuple(markers.items()),
        tuple(across.items()),
        tuple(words(dots, markers, across, asked)),
        tuple(legend(found, chosen, asked)),
    )


# Reading the report


def mark_of(one: FrontierPoint) -> Reached | None:
    if not 1 <= one.size_bytes < HUGE or one.damage >= HUGE:
        return None
    answer = "" if one.latency_ms is None else f", {time_text(one.latency_ms)} an answer"
    damage = max(one.damage, 0.0)
    return Reached(one.size_bytes, damage, f"{size_text(one.size_bytes)}, damage {share_text(damage)}{answer}")


def chosen_point(report: CompressReport, of: Callable[[Amount], float | None]) -> Reached | None:
    """The predicted, or measured, values of the chosen point."""
    fidelity, size = of(report.fidelity.mean), of(report.size_bytes)
    if fidelity is None or size is None:
        return None
    return mark_of(FrontierPoint(size, 1 - fidelity, of(report.latency_ms.p50)))


def requested_limits(report: CompressReport) -> dict[str, float]:
    """Requested bytes and damage."""
    size, quality = (report.asked.get(name) for name in ("size", "quality"))
    found = {"size": size} if isinstance(size, float) and 1 <= size < HUGE else {}
    return found | ({"damage": max(0.0, 1 - quality)} if isinstance(quality, float) and quality > -HUGE else {})


# Axes


def unit_of(top: float) -> tuple[float, str]:
    """
    >>> unit_of(90.9e6), unit_of(500), unit_of(2e6)
    ((1000000.0, 'MB'), (1.0, 'B'), (1000000.0, 'MB'))
    """
    power = min(len(UNITS) - 1, max(0, floor(log10(top) / 3 + 1e-9)))
    return 1000.0**power, UNITS[power]


def size_axis(sizes: Sequence[float]) -> tuple[str, PlotAxis]:
    low, high = min(sizes), max(sizes)
    step, unit = unit_of(high)
    wide = high > WIDE * low
    if wide:
        low, high = low / 1.15, high * 1.15
        marks = [mark * step for mark in log_marks(low / step, high / step)]
        scale = Scale(log10(low), log10(high), LEFT, RIGHT)
    else:
        marks = [mark * step for mark in ticks(low / step, high / step)]
        scale = Scale(marks[0], marks[-1], LEFT, RIGHT)
    return unit, PlotAxis(scale, wide, tuple((mark, f"{mark / step:,.6g}") for mark in marks))


def damage_axis(damages: Sequence[float]) -> tuple[str, PlotAxis]:
    """The name and scale of the axis; no damage gets a line of its own if needed."""
    some = [damage for damage in damages if damage > NO_DAMAGE]
    if not some:
        return "fidelity", PlotAxis(Scale(0.0, 1.0, TOP, BOTTOM), False, ((1.0, "0"), (0.5, ".5"), (0.0, "1")))
    low, high = min(some) / 1.5, max(some) * 1.5
    marks = [(mark, share_text(mark)) for mark in log_marks(low, high)]
    if len(some) < len(damages):
        low /= max(4.0, (high / low) ** 0.25)
        marks = [(low, "0"), *marks]
    return "damage (1 - fidelity)", PlotAxis(Scale(log10(low), log10(high), BOTTOM, TOP), True, tuple(marks))


def log_marks(low: float, high: float) -> list[float]:
    """A few round values between low and high, evenly spaced on a logarithmic scale.

    >>> log_marks(8, 100), log_marks(0.0011, 0.0042), log_marks(1e-5, 0.2)
    ([10.0, 20.0, 50.0, 100.0], [0.002, 0.003, 0.004], [1e-05, 0.0001, 0.001, 0.01, 0.1])
    """
    powers, found = range(floor(log10(low)), ceil(log10(high)) + 1), []
    for factors in ((1,), (1, 2, 5), range(1, 10)):
        found = [mark for power in powers for factor in factors if low <= (mark := float(f"{factor}e{power}")) <= high]
        if len(found) >= 3:
            break
    found = found if len(found) > 1 else [mark for mark in ticks(low, high) if low <= mark <= high]
    return found[:: ceil(len(found) / MOST_MARKS) or 1]


def columns(x: PlotAxis) -> tuple[Mark, ...]:
    """Sizes below the plot; those at the ends stay inside."""
    places = [(x(value), text) for value, text in x.marks]
    return tuple(
        Mark(at, text, "start" if at < LEFT + 8 else "end" if at > RIGHT - 12 else "middle") for at, text in places
    )


# Labels

Box = tuple[float, float, float, float]  # left, top, right, bottom


def words(
    dots: Sequence[Reached], markers: Mapping[str, Reached], across: Mapping[str, float], asked: Mapping[str, float]
) -> Iterator[Word]:
    """Labels of lines and points, each at the first place where it covers nothing else; left out if there is none."""
    lines = [
        *along_line([one.place for one in dots]),
        *([along_x(across["size"])] if "size" in across else []),
        *([(LEFT, across["damage"] - 1, RIGHT, across["damage"] + 1)] if "damage" in across else []),
    ]
    taken = [(x - 8, y - 8, x + 8, y + 8) for x, y in (one.place for one in markers.values())]
    wanted: list[tuple[str, str, list[tuple[float, float, str]]]] = []
    upper = min(markers, key=lambda kind: markers[kind].place[1], default="")
    for kind, one in markers.items():  # the frontier falls from left to right: there is room above and to the right
        x, y = one.place
        sides = NEAR + FAR if kind == upper else FAR + NEAR
        wanted.append((kind, kind, [(x + right, y + down, anchor) for right, down, anchor in sides]))
    if "size" in across:
        x = across["size"]
        wanted.append(
            (
                f"asked {asked_size_text(asked['size'])}",
                "alert",
                [
                    (x + side, y, anchor)
                    for y in (TOP + 11, BOTTOM - 8, TOP + 29, BOTTOM - 26)
                    for side, anchor in ((6, "start"), (-6, "end"))
                ],
            )
        )
    if "damage" in across:
        y = across["damage"]
        along = ((RIGHT, "end"), (LEFT + 6, "start"), ((LEFT + RIGHT) / 2, "middle"))
        wanted.append(
            (
                f"asked {asked_share_text(1 - asked['damage'])}",
                "alert",
                [(x, y + down, anchor) for down in (-6, 16) for x, anchor in along],
            )
        )
    for text, tone, places in wanted:
        for others in ([*taken, *lines], taken):
            free = next((one for one in places if is_free(box_of(text, *one), others)), None)
            if free is not None:
                taken.append(box_of(text, *free))
                yield Word(text, round(free[0], 1), round(free[1], 1), free[2], tone)
                break


def box_of(text: str, x: float, y: float, anchor: str) -> Box:
    width = LETTER * len(text)
    left = x - width * {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor]
    return left, y - LINE + 3, left + width, y + 3


def is_free(box: Box, others: Sequence[Box]) -> bool:
    left, top, right, bottom = box
    inside = left >= LEFT and right <= RIGHT + 4 and top >= TOP - 6 and bottom <= BOTTOM
    return inside and not any(
        left < other[2] and other[0] < right and top < other[3] and other[1] < bottom for other in others
    )


def along_line(points: Sequence[Point]) -> Iterator[Box]:
    """A line through points as small boxes."""
    for (x, y), (right, down) in pairwise(points):
        count = ceil(max(abs(right - x), abs(down - y)) / STEP) or 1
        for place in range(count + 1):
            at, low = x + (right - x) * place / count, y + (down - y) * place / count
            yield at - 1, low - 1, at + 1, low + 1


def along_x(x: float) -> Box:
    return x - 1, TOP, x + 1, BOTTOM


def legend(
    found: Sequence[Reached], chosen: Mapping[str, Reached], asked: Mapping[str, float]
) -> Iterator[tuple[str, str]]:
    if found:
        yield "line", "what can be reached"
    for kind, one in chosen.items():
        yield kind, f"{'chosen, ' * (kind == 'predicted')}{kind}: {one.text}"
    told = [asked_size_text(asked["size"])] if "size" in asked else []
    told += [f"fidelity {asked_share_text(1 - asked['damage'])}"] if "damage" in asked else []
    if told:
        yield "asked", f"asked for: {', '.join(told)}"


def label_of(found: Sequence[Reached], chosen: Mapping[str, Reached]) -> str:
    """For screen readers."""
    reach = [f"From {found[0].text} to {found[-1].text}"] if found else []
    return "Size against damage. " + ". ".join(
        reach + [f"{kind.capitalize()}: {one.text}" for kind, one in chosen.items()]
    )


def note_of(left_out: int, x: PlotAxis, y: PlotAxis) -> str:
    scales = {
        (True, True): "Both scales are logarithmic. ",
        (False, True): "The scale of damages is logarithmic. ",
        (True, False): "The scale of sizes is logarithmic. ",
    }.get((x.logarithmic, y.logarithmic), "")
    none = "The lowest line is no damage at all. " if y.logarithmic and y.marks[0][1] == "0" else ""
    lost = f"{left_out:,} of its points {'is' if left_out == 1 else 'are'} no numbers and left out." if left_out else ""
    return f"The least damage that can be had at each size, by arithmetic. {scales}{none}{lost}".strip()
