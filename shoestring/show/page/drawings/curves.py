"""The charts of a run: loss and validation, other figures of the steps, and memory over time."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from operator import itemgetter
from typing import Any

from markupsafe import Markup

from shoestring.core.units import about, bytes_text, seconds_text
from shoestring.runs.reports.report import Report
from shoestring.show.page.drawings.charts import FEW, Chart, Line
from shoestring.show.page.drawings.drawing import groups
from shoestring.show.page.render import NONE, render
from shoestring.show.page.times import clock_of
from shoestring.show.page.words import (
    count_text,
    loss_text,
    number,
    numbers,
    rate_unit,
    step_seconds,
    step_word,
    together,
    verb_of,
)

TONES = ("update", "optimizer", "inputs", "buffers", "temporaries")  # of metrics
MOST_METRICS, MOST_CHARTS, MOST_ROWS, MOST_NAME = 12, 3, 6, 30  # limits that keep the page small
HELD_OUT = "loss"  # name of the held-out loss among the metrics


def metric_names(report: Report) -> list[str]:
    """The job's metrics, in the order of their first value."""
    return list(dict.fromkeys(name for one in report.validated for name in one.metrics))[:MOST_METRICS]


def metric_line(report: Report, name: str, tone: str, shown: str = "") -> Line:
    """A metric by the step of its validations."""
    steps, values = [one.step for one in report.validated], [number(one.metrics.get(name)) for one in report.validated]
    best = report.best.step if report.best is not None else None
    return Line(shown or name[:MOST_NAME], tone, steps, values, dots=True, best=best)


def step_line(report: Report, values: Sequence[float], name: str, tone: str) -> Line:
    """A value recorded for every step."""
    return Line(name, tone, report.curves.numbers[: len(values)], values)


def step_chart(report: Report, key: str, title: str, note: str, *lines: Line, rows: str = "", **more: Any) -> Markup:
    """A chart by step."""
    steps, borders = report.curves.numbers, report.curves.borders
    span = (steps[0], steps[-1]) if steps else None
    return Chart(
        key, title, note, lines, step_word(report), rows=rows or title.lower(), span=span, borders=borders, **more
    ).draw()


def losses(report: Report) -> Markup:
    """Training and held-out loss by step."""
    found = report.curves.losses
    known, names, word, best = numbers(found), metric_names(report), step_word(report), report.best
    lines = [step_line(report, found, "training", "forward")] * bool(known)
    lines += [metric_line(report, HELD_OUT, "backward", "held out")] * (HELD_OUT in names)
    note = f"From {loss_text(known[0])} at the first {word} to {loss_text(known[-1])} at the last." if known else ""
    note += f" {len(found) - len(known):,} losses were not numbers." if len(known) < len(found) else ""
    note += f" Best validation at {word} {best.step:,}." if best is not None else ""
    return step_chart(report, "loss", "Loss", note.strip(), *lines, tools=True, named=bool(names))


def metrics(report: Report) -> list[Markup]:
    """The job's metrics by step: fractions together in one chart, other metrics in a chart each."""
    names = [name for name in metric_names(report) if name != HELD_OUT]
    drawn = {name: metric_line(report, name, TONES[place % len(TONES)]) for place, name in enumerate(names)}
    shares = [name for name in names if (found := numbers(drawn[name].y)) and min(found) >= 0 and max(found) <= 1]
    sets = ([shares] if shares else []) + [[name] for name in names if name not in shares]
    return [
        metric_chart(report, [drawn[name] for name in taken[: len(TONES)]], validation_note(report, taken))
        for taken in sets[:MOST_CHARTS]
    ]


def metric_chart(report: Report, lines: Sequence[Line], note: str) -> Markup:
    names = [line.name for line in lines]
    title, key = names[0].capitalize() if len(names) == 1 else "Metrics", f"metric {' '.join(names)}"[:80]
    return step_chart(report, key, title, note, *lines, rows=", ".join(names)[:40], named=True)


def validation_note(report: Report, names: Sequence[str]) -> str:
    """The last and the best values."""
    last, best, told = report.validated[-1], report.best, []
    for name in names[:3]:
        at = ""
        if best is not None and best.step != last.step and number(best.metrics.get(name)) is not None:
            at = f" ({known_text(best.metrics[name])} at the best validation)"
        told += [f"{name[:MOST_NAME]} {known_text(last.metrics.get(name))}{at}"]
    return "On held-out data: " + "; ".join(told) + "."


def validations(report: Report) -> Markup:
    """The latest validations and the best one as a table."""
    found, names, best = report.validated, metric_names(report)[:5], report.best
    if not found:
        return Markup()
    newest = found[: -MOST_ROWS - 1 : -1]
    older = [best] if best is not None and best.step < newest[-1].step else []
    note = count_text(len(found), "validation") + (
        f", the newest {MOST_ROWS} and the best:" if len(found) > MOST_ROWS else ", newest first."
    )
    rows = [
        (
            one.step,
            one.epoch,
            [known_text(one.metrics.get(name)) for name in names],
            best is not None and one.step == best.step,
        )
        for one in (*newest, *older)
    ]
    epochs = any(one.epoch for one in found)
    return render("validations.html", note=note, word=step_word(report), names=names, epochs=epochs, rows=rows)


def known_text(value: float | None) -> str:
    return NONE if value is None or not isfinite(value) else loss_text(value)


def rates(report: Report) -> Markup:
    """The learning rate by step, if there is a schedule."""
    line = step_line(report, report.curves.rates, "learning rate", "temporaries")
    known = numbers(line.y)
    note = f"Now {known[-1]:.3g}, at most {max(known):.3g}." if known else ""
    return step_chart(report, "rate", "Learning rate", note, line, zero=True)


def norms(report: Report) -> Markup:
    """The gradient norm before clipping, by step."""
    line = step_line(report, report.curves.norms, "gradient norm", "backward")
    known, note = numbers(line.y), ""
    if known:
        note = f"Global norm before clipping: {loss_text(known[-1])} at the last {step_word(report)}, at most {loss_text(max(known))}."
    return step_chart(report, "norm", "Gradient norm", note, line, rows="norm")


def throughput(report: Report) -> Markup:
    """Steps per second, by step."""
    line = step_line(report, report.curves.seconds, "speed", "optimizer")
    known = numbers(line.y)
    if len(known) < 2 or min(known) <= 0:
        return Markup()
    usual, word = step_seconds(report) or sum(known) / len(known), step_word(report)
    factor, unit = rate_unit(1 / usual, word)
    few = line.fewer(FEW // 3)
    speed = Line("speed", "optimizer", few.x, [None if value is None else factor / value for value in few.y])
    note = f"The median {word} takes {seconds_text(usual)}; all {count_text(len(known), word)} took {seconds_text(sum(known))}."
    if (count := together(report)) > 1:
        note += f" {count} processes load batches, so {count} steps in a row count as one, with their mean."
    note += " The first of a process are slower: their memory is tracked." if word == "step" else ""
    return step_chart(report, "speed", "Speed", note, speed, unit=unit, rows=unit, zero=True)


def process_line(report: Report) -> Line:
    """Peak memory of the process by seconds of training."""
    found, clock = groups(report.curves.process), clock_of(report)
    points = [(group[-1][0], max(map(itemgetter(1), group))) for group in found]
    times = [clock(when) if clock is not None else when for when, _ in points]
    return Line("process", "update", times, [size for _, size in points])


def process(report: Report) -> Markup:
    """Memory of the process over the time that it trained."""
    line, clock = process_line(report), clock_of(report)
    if len(line.x) < 2:
        return Markup()
    note = f"The whole process, libraries included: at most {bytes_text(max(numbers(line.y)))}."
    note += (
        f" Planning took {about(clock.planning)} before that." if clock is not None and clock.planning >= 0.5 else ""
    )
    return Chart(
        "memory",
        f"Memory while {verb_of(report).going}",
        note,
        (line,),
        "time",
        "bytes",
        "process",
        zero=True,
        budget=report.memory,
    ).draw()
