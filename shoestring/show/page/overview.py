"""The overview of several runs: a chart that overlays selected runs, and a sortable table.

The table has a column for every flag in which the runs differ. A run's lines are only sent when requested (`curves`),
so the page stays small for any number of runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from urllib.parse import quote

from markupsafe import Markup

from shoestring.core.units import about, bytes_text
from shoestring.runs.reports.report import Report
from shoestring.show.page.drawings.charts import MOST, Chart, Line
from shoestring.show.page.drawings.curves import HELD_OUT, MOST_NAME, metric_line, metric_names, process_line, step_line
from shoestring.show.page.drawings.drawing import Strip, strip
from shoestring.show.page.render import render
from shoestring.show.page.room_page import Cell, RoomCell, ask_room, page_of, pages
from shoestring.show.page.sections.standing import NO_BETTER, counted_steps, headline, standing, taken_steps, why_ended
from shoestring.show.page.times import clock_of
from shoestring.show.page.words import (
    STATES,
    count_text,
    flags_of,
    job_text,
    loss_text,
    number,
    numbers,
    share_done,
    state_of,
    step_word,
    warnings_in,
)

MOST_RUNS, MOST_FLAGS, MOST_METRICS, DRAWN = (
    250,
    8,
    5,
    8,
)  # rows and columns that keep the page small; runs that are drawn at first
GOING_ON = ("planning", "running")
SHORT, MOST_TECHNIQUES = 140, 80  # characters of why a run failed, and of its techniques


@dataclass(frozen=True)
class Summary:
    """What the overview shows of one run."""

    name: str
    state: str = ""
    tone: str = ""
    word: str = ""
    why: str = ""
    job: str = ""
    stand: str = ""
    warned: int = 0
    bar: Strip | None = None
    techniques: str | None = None  # None before there is a plan
    flags: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the best validation
    loss: float | None = None
    memory: tuple[float | None, float | None, float | None] = (None, None, None)  # predicted, measured, budget
    seconds: float | None = None  # time that it trained
    steps: int = 0
    mark: str = ""  # changes when there is something new to draw
    line: Line | None = None  # its loss
    cells: tuple[Cell, ...] = ()  # in the order of the table's columns
    counts: str = "step"  # what its steps are called
    plans_memory: bool = True  # whether its plan predicts the memory of the process
    of_room: tuple[RoomCell, ...] = ()  # figures of its room alone

    @property
    def place(self) -> str:
        return quote(self.name, safe="")


def summary(report: Report, name: str) -> Summary:
    """The overview's data of one run: state, progress, flags and figures."""
    stands, losses, found = standing(report), numbers(report.curves.losses), clock_of(report)
    best, measured = report.best.metrics if report.best is not None else {}, report.measured.get("process_bytes")
    line = step_line(report, report.curves.losses, name, "forward").fewer(60)
    return Summary(
        name,
        state_of(report),
        stands.tone,
        stands.word,
        shorter(stands.why),
        str(job_text(report)),
        stand(report),
        warnings_in(report),
        bar(report, stands.tone),
        techniques_in(report),
        {name[:60]: str(value)[:60] for name, value in flags_of(report).items()},
        {name: value for name in metric_names(report) if (value := number(best.get(name))) is not None},
        losses[-1] if losses else None,
        (report.plan.predicted.get("process_bytes"), measured, report.memory),
        found.trained if found else None,
        taken_steps(report),
        f"{len(report.curves.losses)}-{len(report.validated)}",
        line if losses else None,
        counts=step_word(report),
        plans_memory=page_of(report).plans_memory,
        of_room=tuple(ask_room(report, RoomCell, lambda room: room.cells(report.of_room))),
    )


def techniques_in(report: Report) -> str | None:
    """The techniques of a run's plan; None if there is no plan yet.

    >>> from shoestring.runs.reports.plan_summary import PlanSummary
    >>> techniques_in(Report(plan=PlanSummary(techniques=()))), techniques_in(Report())
    ('plain', None)
    """
    if report.plan.techniques is None:
        return None
    return " + ".join(one.text for one in report.plan.techniques)[:MOST_TECHNIQUES] or "plain"


def shorter(text: str) -> str:
    """The first sentence of a reason, shortened at a word.

    >>> shorter("It died. It was at step 3."), shorter("word " * 40)[-8:]
    ('It died.', 'd word …')
    """
    first = re.split(r"(?<=\.) |\n", text, maxsplit=1)[0]
    return first if len(first) <= SHORT else first[:SHORT] + "…"


def stand(report: Report) -> str:
    """A run's progress in few words."""
    told = headline(report)
    ended = why_ended(report)
    done = counted_steps(report) + (f": {ended}" if ended.startswith(NO_BETTER) else "")
    return done if state_of(report) == "finished" else told.rstrip(".")


def bar(report: Report, tone: str) -> Strip | None:
    share, state = share_done(report), state_of(report)
    if share is None or state in ("planning", "finished"):
        return None
    colour = {"running": "forward", "diverged": "alert", "failed": "alert", "died": "alert"}.get(tone, "other")
    return strip(f"{100 * share:.0f} % done", [(0, share, colour)])


@dataclass(frozen=True)
class Column:
    name: str
    cell: Callable[[Summary], Cell]
    first: str = "up"  # sort order on the first click
    long: bool = False  # long text, which may wrap


def overview(runs: Sequence[Summary]) -> Markup:
    """The inside of <main>, given all runs."""
    shown = sorted(runs, key=lambda one: one.state not in GOING_ON)[:MOST_RUNS]
    words = [one.word.lower() for one in runs if one.word]
    going = (page.verb.going for page in pages().values())
    order = dict.fromkeys(["planning", *going, *(word.lower() for word in STATES.values()), "ended early", "diverged"])
    unread = len(runs) - len(words)
    counts = ", ".join(
        [f"{words.count(word)} {word}" for word in order if word in words] + [f"{unread} not read yet"] * bool(unread)
    )
    found, same = columns(shown)
    rows = [replace(one, cells=tuple(column.cell(one) for column in found)) for one in shown]
    return render(
        "overview.html",
        name=count_text(len(runs), "run"),
        stand=counts,
        same=same,
        columns=found,
        rows=rows,
        more=len(runs) - MOST_RUNS,
        drawn=DRAWN,
        chart=overlaid(shown),
    )


def columns(runs: Sequence[Summary]) -> tuple[list[Column], str]:
    """The columns after run and state, and what all runs have in common, in words."""
    names = list(dict.fromkeys(name for one in runs for name in one.flags))
    known = [one.flags for one in runs if one.word or one.flags]  # others are not read yet
    differ = [name for name in names if len({flags.get(name) for flags in known}) > 1]
    common = [f"{name} {known[0][name]}" for name in names if name not in differ]
    same = f"All runs have {', '.join(common)[:300]}." if common and len(runs) > 1 else ""
    metrics = list(dict.fromkeys(name for one in runs for name in one.metrics))[:MOST_METRICS]
    found = [Column(name, flag_cell(name)) for name in differ[:MOST_FLAGS]]
    found += [Column("Techniques", techniques_cell, long=True)] * any(one.techniques is not None for one in runs)
    found += [Column("Training loss", lambda one: number_cell(one.loss, loss_text))] * any(
        one.loss is not None for one in runs
    )
    found += [
        Column(
            "Held-out loss" if name == HELD_OUT else f"Best {name}",
            metric_cell(name),
            "up" if name == HELD_OUT else "down",
        )
        for name in metrics
    ]
    first = {one.column: one.first for run in runs for one in run.of_room}
    found += [Column(name, room_cell(name), way) for name, way in first.items()]
    found += (
        [Column("Memory", measured_cell)]
        if {one.plans_memory for one in runs if one.state} == {False}
        else [
            Column("Predicted", lambda one: number_cell(one.memory[0], bytes_text)),
            Column("Measured", measured_cell),
            Column("Budget", lambda one: number_cell(one.memory[2], bytes_text)),
        ]
    )
    return [*found, Column("Time", lambda one: number_cell(one.seconds, about))], same


def room_cell(name: str) -> Callable[[Summary], Cell]:
    return lambda one: next((own.cell for own in one.of_room if own.column == name), Cell())


def techniques_cell(one: Summary) -> Cell:
    return Cell() if one.techniques is None else Cell(one.techniques, one.techniques)


def flag_cell(name: str) -> Callable[[Summary], Cell]:
    return lambda one: Cell(one.flags[name][:40], one.flags[name][:40]) if name in one.flags else Cell()


def metric_cell(name: str) -> Callable[[Summary], Cell]:
    return lambda one: number_cell(one.metrics.get(name), loss_text)


def number_cell(value: float | None, text: Callable[[float], str]) -> Cell:
    return Cell() if value is None else Cell(text(value), float(f"{value:.6g}"))


def measured_cell(one: Summary) -> Cell:
    _, used, budget = one.memory
    return replace(number_cell(used, bytes_text), over=used is not None and budget is not None and used > budget)


def overlaid(runs: Sequence[Summary]) -> Markup:
    """The chart of the runs drawn at first; the script draws those that are ticked."""
    lines = tuple(
        replace(one.line, tone=f"run-{place}") for place, one in enumerate(runs[:DRAWN]) if one.line is not None
    )
    counts = sorted({one.counts for one in runs if one.line is not None}, reverse=True)
    told = Chart("runs", "Training loss", "", lines, " or ".join(counts) or "step", rows="training loss", tools=True)
    return told.draw("overlaid.html")


def curves(report: Report) -> str:
    """All lines of a run by name, as JSON."""
    found: Iterable[tuple[str, Line]] = (
        ("training loss", step_line(report, report.curves.losses, "", "")),
        *(
            ("held-out loss" if name == HELD_OUT else name[:MOST_NAME], metric_line(report, name, ""))
            for name in metric_names(report)
        ),
        ("learning rate", step_line(report, report.curves.rates, "", "")),
        ("gradient norm", step_line(report, report.curves.norms, "", "")),
        *ask_room(report, tuple, lambda room: room.lines(report.of_room)),
        ("memory", process_line(report)),
    )
    return (
        "{"
        + ",".join(f"{json.dumps(name)}:{line.fewer(MOST).as_json()}" for name, line in found if line.has_values)
        + "}"
    )
