"""The sections made of figures: predicted beside measured, and what can be drawn."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from math import ceil
from operator import itemgetter

from shoestring.core.units import bytes_text, seconds_text
from shoestring.show.page.drawing import (
    BOTTOM,
    LEFT,
    MOST_POINTS,
    RIGHT,
    TOP,
    Scale,
    along,
    curve,
    drawing,
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
from shoestring.show.page.words import (
    NONE,
    Told,
    counted,
    figure_of,
    inner,
    lines,
    listed,
    loss_text,
    number,
    numbers,
    pairs,
    percent,
    rate_text,
    rate_unit,
    said,
    section,
    tidy,
)

MOST_BARS = 120
PHASES = ("forward", "backward", "update")
PARTS = ("parameters", "optimizer", "gradients", "activations", "temporaries", "inputs", "buffers")


def comparison(story: Told) -> str:
    """The table of predicted beside measured."""
    asked = (("Tensors", "peak_bytes", bytes_text), ("Process", "process_bytes", bytes_text),
             ("One step", "step_seconds", seconds_text))
    sides = ("predicted", "measured", "plain")
    rows = [(name, text, [figure_of(story, side, key) for side in sides]) for name, key, text in asked]
    body = [row(name, text, *values) for name, text, values in rows if any(value is not None for value in values)]
    body += [budget_row(story)] if body and figure_of(story, "budget", "memory") else []
    head = "".join(f'<th scope="col">{name}</th>' for name in ("", "Predicted", "Measured", "Difference", "Plain"))
    note = ("Highest memory at any moment, and the time of one step. The difference is measured against predicted; "
            "plain is what training without any technique would need.")
    table = f'<table class="compared">\n<thead><tr>{head}</tr></thead>\n<tbody>\n{lines(body)}</tbody>\n</table>'
    return section("Predicted and measured", note, table) if body else ""


def row(name: str, text: Callable[[float], str], predicted: float | None, measured: float | None, plain: float | None) -> str:
    change = percent(measured / predicted - 1) if measured is not None and predicted else NONE
    first, second, last = (NONE if value is None else text(value) for value in (predicted, measured, plain))
    return f'<tr><th scope="row">{name}</th><td>{first}</td><td>{second}</td><td>{change}</td><td>{last}</td></tr>'


def budget_row(story: Told) -> str:
    budget, used = figure_of(story, "budget", "memory") or 0, figure_of(story, "measured", "process_bytes")
    left = "" if used is None else f", {bytes_text(budget - used)} left" if used <= budget else (
        f', <span class="over">{bytes_text(used - budget)} too much</span>')
    return f'<tr class="budget"><th scope="row">Budget</th><td colspan="4">{bytes_text(budget)} for the process{left}</td></tr>'


def losses(story: Told) -> str:
    """The loss by step."""
    found = listed(story.get("losses"))
    known = numbers(found)
    if not known:
        return ""
    size, drawn = ceil(len(found) / MOST_POINTS), thin(found, mean)
    marks = ticks(min(loss for _, loss in drawn), max(loss for _, loss in drawn))
    y = Scale(marks[0], marks[-1], BOTTOM, TOP)
    note = f"From {loss_text(known[0])} at the first step to {loss_text(known[-1])} at the last."
    note += f" Each point is the mean of {size} steps." if size > 1 else ""
    note += f" {len(found) - len(known):,} losses were not numbers." if len(known) < len(found) else ""
    below, x = steps_below(len(found))
    body = upright(marks, y, "{:.6g}".format, "loss") + below + curve(drawn, x, y, "forward")
    return section("Loss", note, f"<figure>\n{drawing(f'Loss by step. {note}', body)}\n</figure>")


def steps_below(count: int) -> tuple[str, Scale]:
    """The axis of steps, and its scale."""
    x = Scale(1, count, LEFT, RIGHT)
    marks = [1.0] + [mark for mark in ticks(0, count) if 1 < mark <= count and mark == int(mark)]
    return along(marks, x, lambda mark: f"{mark:,.0f}", "step"), x


def throughput(story: Told) -> str:
    """Steps per second by step."""
    found = listed(story.get("seconds"))
    known = numbers(found)
    if len(known) < 2 or min(known) <= 0:
        return ""
    overall = len(known) / sum(known)
    factor, unit = rate_unit(overall)
    drawn = thin(found, lambda taken: factor * len(taken) / sum(taken), MOST_POINTS // 3)
    marks = ticks(0, max(rate for _, rate in drawn))
    y = Scale(marks[0], marks[-1], BOTTOM, TOP)
    note = f"{rate_text(overall)} over the run, {counted(len(known), 'step')} in {seconds_text(sum(known))} of training."
    below, x = steps_below(len(found))
    body = upright(marks, y, "{:,.6g}".format, unit) + below + curve(drawn, x, y, "optimizer")
    return section("Speed", note, f"<figure>\n{drawing(f'Speed by step. {note}', body)}\n</figure>")


def process(story: Told) -> str:
    """The memory of the process by time."""
    found = groups(pairs(story.get("samples_process")))
    points = [(group[-1][0], max(map(itemgetter(1), group))) for group in found if number(group[-1][0]) is not None]
    if len(points) < 2:
        return ""
    most, budget = max(size for _, size in points), figure_of(story, "budget", "memory")
    unit = seconds_unit(points[-1][0])
    marks, times = memory_marks(most, budget), ticks(0, points[-1][0], unit)
    x, y = Scale(0, points[-1][0], LEFT, RIGHT), Scale(marks[0], marks[-1], BOTTOM, TOP)
    note = f"The whole process, libraries included: at most {bytes_text(most)}."
    below = along([time for time in times if time <= x.high], x, lambda time: seconds_mark(time, unit), "time")
    body = (upright(marks, y, lambda mark: tidy(bytes_text(mark)), "process") + below
            + curve(points, x, y, "update") + limit(budget, y))
    return section("Memory over the run", note, f"<figure>\n{drawing(f'Process memory over time. {note}', body)}\n</figure>")


def blocks(story: Told) -> str:
    """Memory by block, in the order in which the blocks run."""
    found = [(str(name), size) for name, size in pairs(story.get("blocks"))]
    if not found or max(size for _, size in found) <= 0:
        return ""
    where, most = max(found, key=lambda block: block[1])
    budget = figure_of(story, "budget", "memory")
    marks = memory_marks(most, budget)
    y = Scale(marks[0], marks[-1], BOTTOM, TOP)
    label = f"Tensor memory by block through one step; highest {bytes_text(most)} in {where}"
    body = upright(marks, y, lambda mark: tidy(bytes_text(mark)), "tensors") + bars(fewer(found), y) + limit(budget, y)
    note = f"Highest tensor memory while each block runs. The top is {bytes_text(most)}, in {said(where, 60)}."
    if budget:
        lies = "is for the whole process" if budget <= y.high else "for the whole process lies above this scale"
        note += f" The budget of {bytes_text(budget)} {lies}."
    legend = "".join(f'<li><i class="tone-{tone_of(phase)}"></i>{said(phase, 30)}</li>'
                     for phase in list(dict.fromkeys(phase_of(name) for name, _ in found))[:8])
    drawn = drawing(label, body + along([], y, str, "time through one step →"))
    return section("Memory through one step", note, f'<figure>\n{drawn}\n<ul class="legend">{legend}</ul>\n</figure>')


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


def bars(found: Sequence[tuple[str, float]], y: Scale) -> str:
    pitch = (RIGHT - LEFT) / len(found)
    gap = min(3.0, 0.2 * pitch)
    return lines(f'<rect class="tone-{tone_of(phase_of(name))}" x="{LEFT + place * pitch + gap / 2:.1f}" y="{y(size)}" '
                 f'width="{pitch - gap:.1f}" height="{max(0.0, BOTTOM - y(size)):.1f}">'
                 f"<title>{said(name, 80)}: {bytes_text(size)}</title></rect>" for place, (name, size) in enumerate(found))


def parts(story: Told) -> str:
    """What is alive at the highest moment, as a stacked bar and a list."""
    sizes = [(str(name), size) for name, size in pairs(list(inner(inner(story, "measured"), "parts").items())) if size > 0]
    sizes = sorted(sizes, key=lambda part: -part[1])[:12]
    total, start, spans, rows = sum(size for _, size in sizes), 0.0, [], []
    for name, size in sizes:
        tone, end = name if name in PARTS else "other", start + size / total
        spans.append((start, end - 0.003, tone))
        rows.append(f'<li><div><i class="tone-{tone}"></i>{said(name, 60)}</div>'
                    f"<span>{bytes_text(size)}</span><span>{share_text(size / total)}</span></li>")
        start = end
    label = "The peak is made of " + ", ".join(f"{name} {bytes_text(size)}" for name, size in sizes)
    note = f"At the highest moment the tensors take {bytes_text(total)}."
    body = f'<figure class="stack">\n{strip(label, spans)}\n<ul class="parts">\n{lines(rows)}</ul>\n</figure>'
    return section("What the peak is made of", note, body) if sizes else ""


def share_text(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.005 else "&lt; 1 %"
