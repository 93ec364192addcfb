"""The timeline of a pipeline as a picture: each worker's actions, idle time in red, measured below predicted.

A page is sent again and again while a run is watched, so the picture must be small. Few actions are separate boxes with
a tooltip; of many, all actions of a kind are one path; and actions too narrow to be seen are merged first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup

from shoestring.core.units import seconds_text
from shoestring.core.workers.actions import ActionSpan, Kind, Timeline
from shoestring.show.page.drawings.drawing import Mark, Scale, ticks
from shoestring.show.page.render import render
from shoestring.show.page.words import count_text
from shoestring.show.timeline import TONES, WORDS, by_column, drawn_workers, ends, idle_text

WIDTH, LEFT, RIGHT = 760, 60, 744  # size of the drawing, and where the time axis begins and ends
HEADING, ROW, TALL, AXIS, SPACE = (
    24,
    24,
    20,
    22,
    14,
)  # heights: text above a timeline, a row, its boxes, the time axis, a gap
MOST_ROWS, MOST_TOLD = 8, 240  # most workers drawn; most boxes with a tooltip
NARROW, LETTER = 4.0, 6.4  # widths: narrower boxes are merged, and the width of a digit
IDLE, DARK = "tone-alert idle", "tone-backward"  # class of idle time; class on which dark numbers are readable


@dataclass(frozen=True)
class Box:
    """An action, or idle time."""

    x: float
    width: float
    tone: str  # CSS classes
    title: str  # tooltip
    text: str = ""  # number of the micro-batch, if there is room

    @property
    def middle(self) -> float:
        return round(self.x + self.width / 2, 1)


@dataclass(frozen=True)
class WorkerRow:
    """One worker's row."""

    name: str
    y: float
    boxes: tuple[Box, ...]
    whole: bool  # every action is a separate box

    @property
    def numbers(self) -> list[tuple[str, list[Box]]]:
        """The numbers of micro-batches, by the colour of their text."""
        found = {
            "piece dark": [box for box in self.boxes if box.text and DARK in box.tone],
            "piece": [box for box in self.boxes if box.text and DARK not in box.tone],
        }
        return [(name, boxes) for name, boxes in found.items() if boxes]

    @property
    def paths(self) -> dict[str, str]:
        """All boxes of a tone as one path."""
        found: dict[str, list[Box]] = {}
        for box in self.boxes:
            found.setdefault(box.tone, []).append(box)
        return {
            tone: "".join(f"M{box.x:g} {self.y:g}h{box.width:g}v{TALL}h-{box.width:g}z" for box in boxes if box.width)
            for tone, boxes in found.items()
        }


@dataclass(frozen=True)
class Drawing:
    """One timeline."""

    heading: str
    y: float
    rows: tuple[WorkerRow, ...]

    @property
    def top(self) -> float:
        return self.y + HEADING

    @property
    def bottom(self) -> float:
        return self.top + len(self.rows) * ROW


def timeline_section(predicted: Timeline, measured: Timeline | None = None, note: str = "") -> Markup:
    """The section; empty if nothing was predicted."""
    return (
        render("timeline_section.html", note=note, figure=timeline_svg(predicted, measured))
        if any(predicted)
        else Markup()
    )


def timeline_svg(predicted: Timeline, measured: Timeline | None = None) -> Markup:
    """The picture with its legend. Both timelines start at zero and share one axis."""
    shown = [("Predicted", predicted)] + ([("Measured", measured)] if measured is not None else [])
    longest = max(last - first for _, one in shown for first, last in [ends(one)])
    x = Scale(0.0, longest, LEFT, RIGHT)
    drawings: list[Drawing] = []
    for name, timeline in shown:
        drawings += [
            drawing(f"{name}: {idle_text(timeline)}", timeline, x, drawings[-1].bottom + SPACE if drawings else 0.0)
        ]
    label = f"Timeline of {count_text(len(predicted), 'stage')}. {'. '.join(one.heading for one in drawings)}"
    rows = [row for one in drawings for row in one.rows]
    return render(
        "timeline.html",
        label=label,
        drawings=drawings,
        marks=marks(x),
        legend=legend([one for _, one in shown]),
        width=WIDTH,
        left=LEFT,
        tall=TALL,
        bottom=drawings[-1].bottom,
        height=drawings[-1].bottom + AXIS,
        each=all(row.whole for row in rows) and sum(len(row.boxes) for row in rows) <= MOST_TOLD,
    )


def marks(x: Scale) -> list[Mark]:
    """Times below the picture."""
    step = ticks(0.0, x.high / 2)[1]
    return [
        Mark(x(place * step), seconds_text(place * step) if place else "0")
        for place in range(int(x.high / step + 1e-9) + 1)
    ]


def drawing(heading: str, timeline: Timeline, x: Scale, top: float) -> Drawing:
    first, last = ends(timeline)
    workers = drawn_workers(len(timeline), MOST_ROWS)
    left_out = f"; {len(workers)} of {len(timeline)} stages are drawn" if len(workers) < len(timeline) else ""
    rows = tuple(
        row(f"stage {worker}", timeline[worker], first, last, x, top + HEADING + place * ROW, len(timeline))
        for place, worker in enumerate(workers)
    )
    return Drawing(heading + left_out, top, rows)


def row(name: str, own: Sequence[ActionSpan], first: float, last: float, x: Scale, y: float, workers: int) -> WorkerRow:
    columns = max(1, int((x(last - first) - LEFT) / NARROW))
    found = list(separate(own, first, last))
    whole = len(found) <= columns
    found = found if whole else list(together(own, first, (last - first) / columns, columns))
    boxes = (box(spans, begin - first, end - first, x, workers) for spans, begin, end in found)
    return WorkerRow(name, y, tuple(one for one in boxes if one.width), whole)


Stretch = tuple[Sequence[ActionSpan], float, float]  # actions (none: idle), begin, end


def separate(own: Sequence[ActionSpan], first: float, last: float) -> Iterator[Stretch]:
    """A worker's actions and the idle time between them, without gaps."""
    at = first
    for span in own:
        if span.begin > at:
            yield (), at, span.begin
        yield (span,), span.begin, span.end
        at = span.end
    if last > at:
        yield (), at, last


def together(own: Sequence[ActionSpan], first: float, each: float, columns: int) -> Iterator[Stretch]:
    """The same in columns of `each` seconds, if there are too many actions; neighbours of a kind are merged."""
    place = 0
    for kind, run in groupby(
        by_column(own, first, 1 / each if each else 0.0, columns), lambda action: action.kind if action else None
    ):
        actions = list(run)
        begin, place = place, place + len(actions)
        since, until = first + begin * each, first + place * each
        yield [ActionSpan(action, since, until) for action in actions if action] if kind else (), since, until


def box(spans: Sequence[ActionSpan], begin: float, end: float, x: Scale, workers: int) -> Box:
    left, width = x(begin), round(x(end) - x(begin), 1)
    when = f"{seconds_text(begin)} to {seconds_text(end)}"
    if not spans:
        return Box(left, width, IDLE, f"idle, {when}")
    action = spans[0].action
    chunk = f", chunk {action.chunk}" if action.chunk >= workers else ""
    number = str(action.piece) if len(spans) == 1 and width >= LETTER * len(str(action.piece)) + 2 else ""
    tone = f"tone-{TONES[action.kind]}" + (" later" if action.chunk // workers % 2 else "")
    return Box(left, width, tone, f"{WORDS[action.kind]} of piece {action.piece}{chunk}, {when}", number)


def legend(timelines: Sequence[Timeline]) -> list[tuple[str, str]]:
    """CSS classes, and what they mean."""
    spans = [(span, len(one)) for one in timelines for own in one for span in own]
    kinds = [kind for kind in Kind if any(span.action.kind is kind for span, _ in spans)]
    several = any(span.action.chunk >= workers for span, workers in spans)
    shade = [("tone-forward later", "this shade: every other chunk of a stage")] if several else []
    return [*((f"tone-{TONES[kind]}", WORDS[kind]) for kind in kinds), *shade, (IDLE, "idle")]
