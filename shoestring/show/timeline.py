"""The timeline of a pipeline in a terminal: one line per worker, a letter and the number of the micro-batch where it
computes, dots where it is idle.

    stage 0  F0F1F2····B0──B1──B2──
    stage 1  ··F0F1F2B0──B1──B2──··

The picture consists of columns of equal time; each shows what the worker did for most of it. So any number of actions
can be drawn, and idle time shorter than half a column only shows in the percentage above the picture.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from shoestring.core.units import seconds_text
from shoestring.core.workers.actions import Action, ActionSpan, Kind, Timeline, idle_share
from shoestring.show.cut import ModelCut
from shoestring.show.terminal import PIPE, Screen, plain, render_text, table_part

if TYPE_CHECKING:
    from rich.console import RenderableType

IDLE = "idle"
TONES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUTS: "backward",
    Kind.WEIGHTS: "update",
}  # as on the page
COLOURS = {"forward": "white on blue", "backward": "black on yellow", "update": "black on green", IDLE: "red"}
WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUTS: "backward to inputs",
    Kind.WEIGHTS: "backward to weights",
}
ON_PIPE, MOST_ROWS = 100, 16  # columns if the width is unknown; most workers drawn


@dataclass(frozen=True)
class ColumnRun:
    """Consecutive columns of one colour."""

    text: str
    tone: str  # forward, backward, update or idle


@dataclass(frozen=True)
class TimelineRow:
    name: str
    stretches: tuple[ColumnRun, ...]

    @property
    def text(self) -> str:
        return self.name + "".join(one.text for one in self.stretches)


@dataclass(frozen=True)
class TimeGrid:
    """How time maps to columns."""

    scale: float  # columns per second
    names: Mapping[
        Kind, int
    ]  # how much of an action's name fits: 1 its letter, 2 with the micro-batch, 3 with the chunk


def rows(timeline: Timeline, grid: TimeGrid) -> list[TimelineRow]:
    """A row for each worker."""
    first, last = ends(timeline)
    columns = round(grid.scale * (last - first))
    found = [
        TimelineRow(name, stretches(timeline[worker], first, columns, grid, len(timeline)))
        for worker, name in names_of(timeline).items()
    ]
    if len(found) < len(timeline):
        found.insert(len(found) // 2, TimelineRow("...", ()))
    return found


def names_of(timeline: Timeline) -> dict[int, str]:
    """The workers that are drawn: number -> name."""
    shown = {worker: f"stage {worker}" for worker in drawn_workers(len(timeline), MOST_ROWS)}
    wide = max(map(len, shown.values()), default=0) + 2
    return {worker: name.ljust(wide) for worker, name in shown.items()}


def drawn_workers(count: int, most: int) -> list[int]:
    """The first and the last workers, if there are too many to draw.

    >>> drawn_workers(3, 4), drawn_workers(100, 4)
    ([0, 1, 2], [0, 1, 98, 99])
    """
    return list(range(count)) if count <= most else [*range(most // 2), *range(count - most // 2, count)]


def ends(timeline: Timeline) -> tuple[float, float]:
    """When the first action begins and the last one ends."""
    spans = [span for own in timeline for span in own]
    return min((span.begin for span in spans), default=0.0), max((span.end for span in spans), default=0.0)


def grid_of(timelines: Sequence[Timeline], width: int) -> TimeGrid:
    """One grid for several timelines. It is as wide as possible, or slightly less if the shortest action of the first
    timeline then takes whole columns, so that equal actions look alike. Names are as long as fits on average, for all
    actions of a kind."""
    named = max(len(name) for one in timelines for name in ["", *names_of(one).values()])
    columns, seconds = max(10, width - named), max(last - first for one in timelines for first, last in [ends(one)])
    shortest = min(
        (span.end - span.begin for own in timelines[0] for span in own if span.end > span.begin), default=0.0
    )
    if not seconds or not shortest:
        return TimeGrid(0.0, {})
    exact = columns * shortest / seconds + 1e-9
    scale = int(exact) / shortest if 1 <= exact < 1.5 * int(exact) else columns / seconds
    spans = [(span, len(one)) for one in timelines for own in one for span in own]
    names = {}
    for kind in {span.action.kind for span, _ in spans}:
        found = [(span, workers) for span, workers in spans if span.action.kind is kind]
        room = scale * sum(span.end - span.begin for span, _ in found) / len(found) + 0.5
        longest = {much: max(len(name_of(span.action, workers, much)) for span, workers in found) for much in (2, 3)}
        names[kind] = max([1, *(much for much, long in longest.items() if long <= room)])
    return TimeGrid(scale, names)


def name_of(action: Action, workers: int, much: int) -> str:
    """The name of an action; chunks of a worker are a, b, ...

    >>> [name_of(Action(Kind.FORWARD, 12, 5), 4, much) for much in (1, 2, 3)], name_of(Action(Kind.BACKWARD, 3, 0), 4, 3)
    (['F', 'F12', 'F12b'], 'B3a')
    """
    part = action.chunk // workers
    return "".join((str(action.kind), str(action.piece), chr(ord("a") + part) if part < 26 else "")[:much])


def stretches(
    own: Sequence[ActionSpan], first: float, columns: int, grid: TimeGrid, workers: int
) -> tuple[ColumnRun, ...]:
    several = len({span.action.chunk for span in own}) > 1
    runs = [(action, sum(1 for _ in run)) for action, run in groupby(by_column(own, first, grid.scale, columns))]
    return tuple(
        ColumnRun("·" * room, IDLE)
        if action is None
        else ColumnRun(
            label(action, workers, min(grid.names[action.kind], 3 if several else 2), room), TONES[action.kind]
        )
        for action, room in runs
    )


def by_column(own: Sequence[ActionSpan], first: float, scale: float, columns: int) -> list[Action | None]:
    """What a worker does for most of each column; None if it is mostly idle. If a column has several actions, short
    ones would never be seen, so a kind that was shown too rarely so far is preferred over the longest action."""
    parts: list[dict[Kind | None, float]] = [{} for _ in range(columns)]  # per column: seconds by kind
    longest: list[dict[Kind | None, tuple[float, Action]]] = [{} for _ in range(columns)]
    for span in own:
        begin, end = (span.begin - first) * scale, (span.end - first) * scale
        for column in range(max(0, int(begin)), min(columns, int(end) + 1)):
            part, kind = min(end, column + 1) - max(begin, column), span.action.kind
            if part > 1e-6:
                parts[column][kind] = parts[column].get(kind, 0.0) + part
                longest[column][kind] = max(
                    longest[column].get(kind, (0.0, span.action)), (part, span.action), key=lambda one: one[0]
                )
    coarse = len(own) > columns
    owed: Counter[Kind | None] = Counter()
    shown = []
    for column in range(columns):
        here = parts[column] | {None: max(0.0, 1 - sum(parts[column].values()))}
        owed.update(here)
        busy = {kind: part for kind, part in here.items() if kind is not None}
        found = (
            max((kind for kind in here if here[kind] > 1e-6), key=lambda kind: owed[kind])
            if coarse
            else (max(busy, key=lambda kind: busy[kind]) if here[None] < 0.5 + 1e-6 else None)
        )
        owed[found] -= 1
        shown.append(longest[column][found][1] if found is not None else None)
    return shown


def label(action: Action, workers: int, much: int, room: int) -> str:
    """As much of an action's name as there is room for.

    >>> label(Action(Kind.FORWARD, 12, 0), 4, 2, 5), label(Action(Kind.FORWARD, 12, 0), 4, 2, 2)
    ('F12──', 'F─')
    """
    names = (name_of(action, workers, less) for less in range(much, 0, -1))
    return next(name for name in names if len(name) <= room).ljust(room, "─")


def timeline_text(predicted: Timeline, measured: Timeline | None = None, screen: Screen = PIPE) -> str:
    """The predicted timeline, and the measured one below on the same scale, with the idle percentage of each and a
    legend."""
    return render_text(timeline_parts(predicted, measured, screen), screen)


def timeline_parts(predicted: Timeline, measured: Timeline | None, screen: Screen) -> list[RenderableType]:
    shown = [("predicted", predicted)] + ([("measured", measured)] if measured is not None else [])
    grid = grid_of([timeline for _, timeline in shown], screen.width or ON_PIPE)
    parts: list[RenderableType] = []
    for name, timeline in shown:
        parts += [plain(f"{name}: {idle_text(timeline)}"), *map(rich_row, rows(timeline, grid))]
    return [*parts, plain(legend(predicted, grid))]


def cut_parts(cut: ModelCut, screen: Screen) -> list[RenderableType]:
    """What each stage holds, and the timeline."""
    rows = [["stage", "blocks", "which", "tensors, predicted", "measured"], *([*row.cells] for row in cut.rows)]
    wanted = [place for place in range(5) if place < 2 or any(row[place] for row in rows[1:])]
    figures = [number for number, place in enumerate(wanted) if place in (1, 3, 4)]
    parts: list[RenderableType] = [
        table_part([[row[place] for place in wanted] for row in rows], right=figures),
        "",
        plain(cut.way),
    ]
    if any(cut.predicted):
        parts += ["", *timeline_parts(cut.predicted, cut.measured, screen)]
    return parts + [plain(cut.note)] * bool(cut.note)


def cut_text(cut: ModelCut, screen: Screen = PIPE) -> str:
    return render_text(cut_parts(cut, screen), screen)


def idle_text(timeline: Timeline) -> str:
    first, last = ends(timeline)
    return f"{seconds_text(last - first)}, {100 * idle_share(timeline):.0f} % idle"


def legend(timeline: Timeline, grid: TimeGrid) -> str:
    """The legend of the picture."""
    words = [f"{kind} {WORDS[kind]}" for kind in Kind if kind in grid.names]
    numbered = ["each with the number of its piece"] if max(grid.names.values(), default=0) > 1 else []
    several = (
        any(span.action.chunk >= len(timeline) for own in timeline for span in own) and max(grid.names.values()) > 2
    )
    return ", ".join([*words, *numbered, *(["a, b, ... the chunks of a stage"] if several else []), "· idle"])


def rich_row(row: TimelineRow) -> RenderableType:
    from shoestring.show.rich_parts import Text

    return Text.assemble(
        row.name, *((one.text, COLOURS[one.tone]) for one in row.stretches), no_wrap=True, overflow="crop"
    )
