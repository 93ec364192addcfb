"""The sections made of figures: predicted beside measured, and what can be drawn."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil
from operator import itemgetter

from markupsafe import Markup

from shoestring.core.figures import Figure
from shoestring.core.units import bytes_text, seconds_text
from shoestring.planning.quantities import MEASURABLE
from shoestring.show.page.drawing import (
    BOTTOM,
    FRAME,
    LEFT,
    MOST_POINTS,
    RIGHT,
    TOP,
    Bar,
    Mark,
    Plot,
    Scale,
    along,
    curve,
    groups,
    limit,
    mean,
    memory_marks,
    seconds_mark,
    seconds_unit,
    strip,
    thin,
    ticks,
    upright,
)
from shoestring.show.page.render import NONE, render
from shoestring.show.page.words import (
    Entries,
    counted,
    figure_of,
    inner,
    listed,
    loss_text,
    number,
    numbers,
    pairs,
    rate_text,
    rate_unit,
    shortened,
    tidy,
)

MOST_BARS = 120
PHASES = ("forward", "backward", "update")
PARTS = ("parameters", "optimizer", "gradients", "activations", "temporaries", "inputs", "buffers")


def comparison(story: Entries) -> Markup:
    """The table of predicted beside measured."""
    found = [Figure(one, figure_of(story, "predicted", one.name), figure_of(story, "measured", one.name)) for one in MEASURABLE]
    rows = [row for one in found if one.shown and (row := compared(one, figure_of(story, "plain", one.quantity.name)))]
    return render("comparison.html", rows=rows, budget=figure_of(story, "budget", "memory"),
                  used=figure_of(story, "measured", "process_bytes")) if rows else Markup()


@dataclass(frozen=True)
class Compared:
    """A row: all as text, with a dash for what is not known."""

    name: str
    predicted: str
    measured: str
    change: str   # of measured against predicted
    plain: str


def compared(figure: Figure, plain: float | None) -> Compared | None:
    predicted, measured = figure.predicted, figure.measured
    if predicted is None and measured is None and plain is None:
        return None
    change = figure.off_text or NONE
    texts = (NONE if value is None else figure.quantity.text(value) for value in (predicted, measured, plain))
    first, second, last = texts
    return Compared(figure.quantity.label.capitalize(), first, second, change, last)


def plotted(title: str, note: str, plot: Plot, legend: Sequence[tuple[str, str]] = ()) -> Markup:
    return render("plot.html", title=title, note=note, plot=plot, legend=legend, frame=FRAME)


def losses(story: Entries) -> Markup:
    """The loss by step."""
    found = listed(story.get("losses"))
    known = numbers(found)
    if not known:
        return Markup()
    size, drawn = ceil(len(found) / MOST_POINTS), thin(found, mean)
    marks = ticks(min(loss for _, loss in drawn), max(loss for _, loss in drawn))
    y = Scale(marks[0], marks[-1], BOTTOM, TOP)
    note = f"From {loss_text(known[0])} at the first step to {loss_text(known[-1])} at the last."
    note += f" Each point is the mean of {size} steps." if size > 1 else ""
    note += f" {len(found) - len(known):,} losses were not numbers." if len(known) < len(found) else ""
    below, x = steps_below(len(found))
    return plotted("Loss", note, Plot(f"Loss by step. {note}", upright(marks, y, "{:.6g}".format), "loss", below, "step",
                                      curve(drawn, x, y, "forward")))


def steps_below(count: int) -> tuple[tuple[Mark, ...], Scale]:
    """The axis of steps, and its scale."""
    x = Scale(1, count, LEFT, RIGHT)
    marks = [1.0] + [mark for mark in ticks(0, count) if 1 < mark <= count and mark == int(mark)]
    return along(marks, x, lambda mark: f"{mark:,.0f}"), x


def throughput(story: Entries) -> Markup:
    """Steps per second by step."""
    found = listed(story.get("seconds"))
    known = numbers(found)
    if len(known) < 2 or min(known) <= 0:
        return Markup()
    overall = len(known) / sum(known)
    factor, unit = rate_unit(overall)
    drawn = thin(found, lambda taken: factor * len(taken) / sum(taken), MOST_POINTS // 3)
    marks = ticks(0, max(rate for _, rate in drawn))
    y = Scale(marks[0], marks[-1], BOTTOM, TOP)
    note = f"{rate_text(overall)} over the run, {counted(len(known), 'step')} in {seconds_text(sum(known))} of training."
    below, x = steps_below(len(found))
    return plotted("Speed", note, Plot(f"Speed by step. {note}", upright(marks, y, "{:,.6g}".format), unit, below, "step",
                                       curve(drawn, x, y, "optimizer")))


def process(story: Entries) -> Markup:
    """The memory of the process by time."""
    found = groups(pairs(story.get("samples_process")))
    points = [(group[-1][0], max(map(itemgetter(1), group))) for group in found if number(group[-1][0]) is not None]
    if len(points) < 2:
        return Markup()
    most, budget = max(size for _, size in points), figure_of(story, "budget", "memory")
    unit = seconds_unit(points[-1][0])
    marks, times = memory_marks(most, budget), ticks(0, points[-1][0], unit)
    x, y = Scale(0, points[-1][0], LEFT, RIGHT), Scale(marks[0], marks[-1], BOTTOM, TOP)
    note = f"The whole process, libraries included: at most {bytes_text(most)}."
    below = along([time for time in times if time <= x.high], x, lambda time: seconds_mark(time, unit))
    return plotted("Memory over the run", note, Plot(
        f"Process memory over time. {note}", upright(marks, y, bytes_mark), "process", below, "time", curve(points, x, y, "update"),
        limit=limit(budget, y)))


def bytes_mark(size: float) -> str:
    return tidy(bytes_text(size))


def blocks(story: Entries) -> Markup:
    """Memory by block, in the order in which the blocks run."""
    found = [(str(name), size) for name, size in pairs(story.get("blocks"))]
    if not found or max(size for _, size in found) <= 0:
        return Markup()
    where, most = max(found, key=lambda block: block[1])
    budget = figure_of(story, "budget", "memory")
    marks = memory_marks(most, budget)
    y = Scale(marks[0], marks[-1], BOTTOM, TOP)
    label = f"Tensor memory by block through one step; highest {bytes_text(most)} in {where}"
    note = f"Highest tensor memory while each block runs. The top is {bytes_text(most)}, in {shortened(where, 60)}."
    if budget:
        lies = "is for the whole process" if budget <= y.high else "for the whole process lies above this scale"
        note += f" The budget of {bytes_text(budget)} {lies}."
    phases = list(dict.fromkeys(phase_of(name) for name, _ in found))[:8]
    return plotted("Memory through one step", note, Plot(
        label, upright(marks, y, bytes_mark), "tensors", (), "time through one step →", bars=bars(fewer(found), y), limit=limit(budget, y),
    ), [(tone_of(phase), phase) for phase in phases])


def phase_of(name: str) -> str:
    return name.split(" ", 1)[0]


def tone_of(phase: str) -> str:
    return phase if phase in PHASES else "other"


def fewer(found: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    """At most about MOST_BARS blocks: neighbours of one phase become the highest of them.

    >>> len(fewer([(f"forward {place}", place) for place in range(1000)]))
    112
    """
    size = ceil(len(found) / MOST_BARS)
    phases = (list(group) for _, group in groupby(found, lambda block: phase_of(block[0])))
    merged = [max(phase[start : start + size], key=lambda block: block[1])
              for phase in phases for start in range(0, len(phase), size)]
    return merged if len(merged) <= 2 * MOST_BARS else [max(merged[start : start + size], key=lambda block: block[1])
                                                        for start in range(0, len(merged), size)]


def bars(found: Sequence[tuple[str, float]], y: Scale) -> tuple[Bar, ...]:
    pitch = (RIGHT - LEFT) / len(found)
    gap = min(3.0, 0.2 * pitch)
    return tuple(Bar(f"{LEFT + place * pitch + gap / 2:.1f}", y(size), f"{pitch - gap:.1f}", f"{max(0.0, BOTTOM - y(size)):.1f}",
                     tone_of(phase_of(name)), name, bytes_text(size)) for place, (name, size) in enumerate(found))


@dataclass(frozen=True)
class Part:
    """Tensors of one kind at the highest moment."""

    name: str
    tone: str
    size: float
    share: str


def parts(story: Entries) -> Markup:
    """What is alive at the highest moment, as a stacked bar and a list."""
    sizes = [(str(name), size) for name, size in pairs(list(inner(inner(story, "measured"), "parts").items())) if size > 0]
    sizes = sorted(sizes, key=lambda part: -part[1])[:12]
    if not sizes:
        return Markup()
    total, start, spans, rows = sum(size for _, size in sizes), 0.0, [], []
    for name, size in sizes:
        tone, end = name if name in PARTS else "other", start + size / total
        spans.append((start, end - 0.003, tone))
        rows.append(Part(name, tone, size, share_text(size / total)))
        start = end
    label = "The peak is made of " + ", ".join(f"{name} {bytes_text(size)}" for name, size in sizes)
    return render("parts.html", note=f"At the highest moment the tensors take {bytes_text(total)}.", bar=strip(label, spans), parts=rows)


def share_text(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.005 else "< 1 %"
