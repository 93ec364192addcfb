"""The sections made of figures: predicted beside measured, and memory charts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import ceil

from markupsafe import Markup

from shoestring.core.figures import Figure, Figures
from shoestring.core.units import bytes_text
from shoestring.runs.reports.report import Report
from shoestring.show.page.drawings.charts import bytes_mark
from shoestring.show.page.drawings.drawing import (
    BOTTOM,
    FRAME,
    LEFT,
    RIGHT,
    TOP,
    Bar,
    Plot,
    Scale,
    Strip,
    limit,
    memory_marks,
    strip,
    upright,
)
from shoestring.show.page.render import NONE, render
from shoestring.show.page.room_page import page_of
from shoestring.show.page.words import share_text, shorten, state_of

MOST_BARS = 90
PHASES = ("forward", "backward", "update")
PARTS = ("parameters", "optimizer", "gradients", "activations", "temporaries", "inputs", "buffers")


def comparison(report: Report) -> Markup:
    """The table of predicted and measured figures."""
    room, over = page_of(report), state_of(report) in ("finished", "")
    found = [
        one if over or one.quantity.name not in room.at_the_end else replace(one, measured=None)
        for one in report.figures
    ]
    plain = report.plan.plain
    rows = [row for one in found if one.shown and (row := compare_figure(one, plain.get(one.quantity.name)))]
    if not rows:
        return Markup()
    budget, used = report.memory, report.measured.get("process_bytes")
    bars = gauge(report) if room.plans_memory or budget else ()
    remarks = Figures(tuple(found)).remarks
    return render("comparison.html", note=room.note, rows=rows, gauge=bars, budget=budget, used=used, remarks=remarks)


@dataclass(frozen=True)
class MemoryGauge:
    """Memory of this run or of the plain one, on one scale with the budget."""

    name: str
    size: float
    bar: Strip


def gauge(report: Report) -> list[MemoryGauge]:
    """This run and the plain one on one scale, with the budget across."""
    budget, used = report.memory, report.measured.get("process_bytes")
    found = [
        ("This run", used, "alert" if used and budget and used > budget else "update"),
        (page_of(report).plain, report.plan.plain.get("process_bytes"), "other"),
    ]
    rows = [(name, size, tone) for name, size, tone in found if size]
    most = max([size for _, size, _ in rows] + [1.02 * (budget or 0)])
    return [
        MemoryGauge(
            name,
            size,
            strip(f"{name}: {bytes_text(size)}", [(0, size / most, tone)], budget / most if budget else None),
        )
        for name, size, tone in rows
    ]


@dataclass(frozen=True)
class Compared:
    """A row of the table, all text; a dash for unknown values."""

    name: str
    predicted: str
    measured: str
    change: str  # difference between predicted and measured
    plain: str


def compare_figure(figure: Figure, plain: float | None) -> Compared | None:
    predicted, measured = figure.predicted, figure.measured
    if predicted is None and measured is None and plain is None:
        return None
    texts = (NONE if value is None else figure.quantity.text(value) for value in (predicted, measured, plain))
    first, second, last = texts
    return Compared(figure.quantity.label.capitalize(), first, second, figure.off_text or NONE, last)


def chart_markup(title: str, note: str, plot: Plot, legend: Sequence[tuple[str, str]] = ()) -> Markup:
    return render("chart.html", title=title, note=note, plot=plot, legend=legend, frame=FRAME, data="", tall=False)


def blocks(report: Report) -> Markup:
    """Memory by block, in the order in which the blocks run."""
    found = report.plan.blocks
    if not found or max(size for _, size in found) <= 0:
        return Markup()
    where, most = max(found, key=lambda block: block[1])
    budget = report.memory
    marks = memory_marks(most, budget)
    y = Scale(marks[0], marks[-1], BOTTOM, TOP)
    label = f"Tensor memory by block through one step; highest {bytes_text(most)} in {where}"
    note = f"Highest tensor memory while each block runs. The top is {bytes_text(most)}, in {shorten(where, 60)}."
    if budget:
        lies = "is for the whole process" if budget <= y.high else "for the whole process lies above this scale"
        note += f" The budget of {bytes_text(budget)} {lies}."
    phases = list(dict.fromkeys(phase_of(name) for name, _ in found))[:8]
    return chart_markup(
        "Memory through one step",
        note,
        Plot(
            label,
            upright(marks, y, bytes_mark),
            "tensors",
            (),
            "time through one step →",
            bars=bars(fewer(found), y),
            limit=limit(budget, y),
        ),
        [(tone_of(phase), phase) for phase in phases],
    )


def phase_of(name: str) -> str:
    return name.split(" ", 1)[0]


def tone_of(phase: str) -> str:
    return phase if phase in PHASES else "other"


def fewer(found: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    """At most about MOST_BARS blocks: neighbours in the same phase are replaced by the highest of them.

    >>> len(fewer([(f"forward {place}", place) for place in range(1000)]))
    84
    """
    size = ceil(len(found) / MOST_BARS)
    phases = (list(group) for _, group in groupby(found, lambda block: phase_of(block[0])))
    merged = [
        max(phase[start : start + size], key=lambda block: block[1])
        for phase in phases
        for start in range(0, len(phase), size)
    ]
    return (
        merged
        if len(merged) <= 2 * MOST_BARS
        else [max(merged[start : start + size], key=lambda block: block[1]) for start in range(0, len(merged), size)]
    )


def bars(found: Sequence[tuple[str, float]], y: Scale) -> tuple[Bar, ...]:
    pitch = (RIGHT - LEFT) / len(found)
    gap = min(3.0, 0.2 * pitch)
    return tuple(
        Bar(
            f"{LEFT + place * pitch + gap / 2:.1f}",
            y(size),
            f"{pitch - gap:.1f}",
            f"{max(0.0, BOTTOM - y(size)):.1f}",
            tone_of(phase_of(name)),
            name,
            bytes_text(size),
        )
        for place, (name, size) in enumerate(found)
    )


@dataclass(frozen=True)
class TensorKind:
    """Tensors of one kind at the moment of the peak."""

    name: str
    tone: str
    size: float
    share: str


def parts(report: Report) -> Markup:
    """What is alive at the peak, as a stacked bar and a list."""
    found = report.largest.parts if report.largest is not None else {}
    sizes = sorted(((name, size) for name, size in found.items() if size > 0), key=lambda part: -part[1])[:12]
    if not sizes:
        return Markup()
    total, start, spans, rows = sum(size for _, size in sizes), 0.0, [], []
    for name, size in sizes:
        tone, end = name if name in PARTS else "other", start + size / total
        spans.append((start, end - 0.003, tone))
        rows.append(TensorKind(name, tone, size, share_text(size / total)))
        start = end
    label = "The peak is made of " + ", ".join(f"{name} {bytes_text(size)}" for name, size in sizes)
    return render(
        "parts.html", note=f"At the peak, tensors take {bytes_text(total)}.", bar=strip(label, spans), parts=rows
    )
