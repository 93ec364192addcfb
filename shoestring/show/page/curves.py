"""The charts of a run: loss and validation first, then what else there is to see of its steps, and its memory over time."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from markupsafe import Markup

from shoestring.core.units import about, bytes_text, seconds_text
from shoestring.show.page.charts import FEW, Chart, Line
from shoestring.show.page.drawing import groups
from shoestring.show.page.render import NONE, render
from shoestring.show.page.times import clock_of
from shoestring.show.page.words import (
    Entries,
    all_numbers,
    counted,
    dicts,
    figure_of,
    inner,
    listed,
    loss_text,
    number,
    numbers,
    numbers_of_steps,
    pairs,
    rate_unit,
    step_seconds,
    step_word,
    whole,
)

TONES = ("update", "optimizer", "inputs", "buffers", "temporaries")  # of metrics
MOST_METRICS, MOST_CHARTS, MOST_ROWS, MOST_NAME = 12, 3, 6, 30  # what keeps the page small
HELD_OUT = "loss"  # what the held-out loss is called among the metrics


def metric_names(story: Entries) -> list[str]:
    """The job's metrics, in the order in which they were told."""
    names = dict.fromkeys(
        str(name) for one in dicts(story.get("metrics")) for name in one if name not in ("step", "epoch")
    )
    return list(names)[:MOST_METRICS]


def metric_line(story: Entries, name: str, tone: str, shown: str = "") -> Line:
    """A metric by the step of its validations."""
    found = [one for one in dicts(story.get("metrics")) if number(one.get("step")) is not None]
    best = number(inner(story, "best").get("step"))
    steps, values = [one["step"] for one in found], [number(one.get(name)) for one in found]
    return Line(shown or name[:MOST_NAME], tone, steps, values, dots=True, best=best)


def step_line(story: Entries, key: str, name: str, tone: str) -> Line:
    """What is told of every step."""
    values, steps = listed(story.get(key)), numbers_of_steps(story)
    count = min(len(values), len(steps)) if steps else len(values)
    steps = steps or list(range(1, count + 1))
    values = values[:count]
    return Line(name, tone, steps[:count], values if all_numbers(values) else [number(value) for value in values])


def borders(story: Entries) -> list[tuple[float, float]]:
    """[step, epochs that are over after it]"""
    return [(step, epochs) for step, epochs in pairs(story.get("borders")) if number(step) is not None]


def span(story: Entries) -> tuple[int, int] | None:
    """The first and the last step, which all charts by step reach to."""
    steps = numbers_of_steps(story)
    return (steps[0], steps[-1]) if steps else None


def losses(story: Entries) -> Markup:
    """The loss in training and on held-out data, by step."""
    line, found = step_line(story, "losses", "training", "forward"), listed(story.get("losses"))
    known, names = numbers(found), metric_names(story)
    lines = [line] * bool(known) + ([metric_line(story, HELD_OUT, "backward", "held out")] if HELD_OUT in names else [])
    word = step_word(story)
    note = f"From {loss_text(known[0])} at the first {word} to {loss_text(known[-1])} at the last." if known else ""
    note += f" {len(found) - len(known):,} losses were not numbers." if len(known) < len(found) else ""
    best = inner(story, "best")
    note += f" Best validation at {word} {whole(best, 'step'):,}." if number(best.get("step")) is not None else ""
    return Chart(
        "loss",
        "Loss",
        note.strip(),
        tuple(lines),
        word,
        rows="loss",
        tools=True,
        named=bool(names),
        span=span(story),
        borders=borders(story),
    ).drawn()


def metrics(story: Entries) -> list[Markup]:
    """The job's metrics by step: shares of one together in one chart, every other metric in one of its own."""
    names = [name for name in metric_names(story) if name != HELD_OUT]
    drawn = {name: metric_line(story, name, TONES[place % len(TONES)]) for place, name in enumerate(names)}
    shares = [name for name in names if (found := numbers(list(drawn[name].y))) and min(found) >= 0 and max(found) <= 1]
    sets = ([shares] if shares else []) + [[name] for name in names if name not in shares]
    return [
        metric_chart(story, [drawn[name] for name in taken[: len(TONES)]], validation_note(story, taken)).drawn()
        for taken in sets[:MOST_CHARTS]
    ]


def metric_chart(story: Entries, lines: Sequence[Line], note: str) -> Chart:
    names = [line.name for line in lines]
    title = names[0].capitalize() if len(names) == 1 else "Metrics"
    return Chart(
        f"metric {' '.join(names)}"[:80],
        title,
        note,
        tuple(lines),
        step_word(story),
        rows=", ".join(names)[:40],
        span=span(story),
        named=True,
        borders=borders(story),
    )


def validation_note(story: Entries, names: Sequence[str]) -> str:
    """The last and the best values."""
    last, best = (dicts(story.get("metrics")) or [{}])[-1], inner(story, "best")
    told = []
    for name in names[:3]:
        now, most = number(last.get(name)), number(best.get(name))
        at = (
            f" ({loss_text(most)} at the best validation)"
            if most is not None and whole(best, "step") != whole(last, "step")
            else ""
        )
        told += [f"{name[:MOST_NAME]} {NONE if now is None else loss_text(now)}{at}"]
    return "On held-out data: " + "; ".join(told) + "."


def validations(story: Entries) -> Markup:
    """The newest validations and the best one as a table."""
    found, names, best = dicts(story.get("metrics")), metric_names(story)[:5], inner(story, "best")
    if not found:
        return Markup()
    newest = found[: -MOST_ROWS - 1 : -1]
    is_best = [bool(best) and one.get("step") == best.get("step") for one in found]
    older = [one for one, kept in zip(found[:-MOST_ROWS], is_best, strict=False) if kept]
    epochs = any(whole(one, "epoch") for one in found)
    note = counted(len(found), "validation") + (
        f", the newest {MOST_ROWS} and the best:" if len(found) > MOST_ROWS else ", newest first."
    )
    return render(
        "validations.html",
        note=note,
        word=step_word(story),
        names=names,
        epochs=epochs,
        rows=[
            (
                whole(one, "step"),
                whole(one, "epoch"),
                [known_text(one.get(name)) for name in names],
                bool(best) and one.get("step") == best.get("step"),
            )
            for one in newest + older
        ],
    )


def known_text(value: object) -> str:
    found = number(value)
    return NONE if found is None else loss_text(found)


def rates(story: Entries) -> Markup:
    """The learning rate by step, where there is a schedule."""
    line = step_line(story, "rates", "learning rate", "temporaries")
    known = numbers(list(line.y))
    note = f"Now {known[-1]:.3g}, at most {max(known):.3g}." if known else ""
    return Chart(
        "rate",
        "Learning rate",
        note,
        (line,),
        step_word(story),
        rows="learning rate",
        zero=True,
        span=span(story),
        borders=borders(story),
    ).drawn()


def norms(story: Entries) -> Markup:
    """The norm of the gradients before clipping, by step."""
    line = step_line(story, "norms", "gradient norm", "backward")
    known = numbers(list(line.y))
    note = (
        f"Global norm before clipping: {loss_text(known[-1])} at the last step, at most {loss_text(max(known))}."
        if known
        else ""
    )
    return Chart(
        "norm", "Gradient norm", note, (line,), step_word(story), rows="norm", span=span(story), borders=borders(story)
    ).drawn()


def throughput(story: Entries) -> Markup:
    """Steps per second by step."""
    line = step_line(story, "seconds", "speed", "optimizer")
    known = numbers(list(line.y))
    if len(known) < 2 or min(known) <= 0:
        return Markup()
    usual, word = step_seconds(story) or sum(known) / len(known), step_word(story)
    factor, unit = rate_unit(1 / usual, word)
    few = line.fewer(FEW // 3)
    speed = Line("speed", "optimizer", few.x, [None if value is None else factor / value for value in few.y])
    note = f"The median {word} takes {seconds_text(usual)}; all {counted(len(known), word)} took {seconds_text(sum(known))}."
    note += " The first of a process are slower: their memory is tracked." if word == "step" else ""
    return Chart("speed", "Speed", note, (speed,), word, unit=unit, rows=unit, zero=True, span=span(story)).drawn()


def process_line(story: Entries) -> Line:
    """The largest memory of the process by the seconds that it had trained."""
    found, clock = groups(pairs(story.get("samples_process"))), clock_of(story)
    points = [(group[-1][0], max(map(itemgetter(1), group))) for group in found if number(group[-1][0]) is not None]
    times = [clock(when) if clock is not None else when for when, _ in points]
    return Line("process", "update", times, [size for _, size in points])


def process(story: Entries) -> Markup:
    """The memory of the process over the time that it trained."""
    line, clock = process_line(story), clock_of(story)
    if len(line.x) < 2:
        return Markup()
    note = f"The whole process, libraries included: at most {bytes_text(max(numbers(list(line.y))))}."
    note += (
        f" Planning took {about(clock.planning)} before that." if clock is not None and clock.planning >= 0.5 else ""
    )
    return Chart(
        "memory",
        "Memory while training",
        note,
        (line,),
        "time",
        "bytes",
        "process",
        zero=True,
        budget=figure_of(story, "budget", "memory"),
    ).drawn()
