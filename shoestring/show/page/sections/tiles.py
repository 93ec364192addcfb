"""The most important figures, in large type with a label each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shoestring.core.units import about, bytes_text, seconds_text
from shoestring.runs.reports.report import Report
from shoestring.show.page.drawings.curves import HELD_OUT, metric_names
from shoestring.show.page.drawings.drawing import Strip
from shoestring.show.page.room_page import ask_room, page_of
from shoestring.show.page.times import clock_of
from shoestring.show.page.words import (
    loss_text,
    number,
    numbers,
    rate_text,
    seconds_left,
    state_of,
    step_seconds,
    step_word,
    verb_of,
)


@dataclass(frozen=True)
class Tile:
    """One important figure with its label."""

    name: str
    figure: str
    note: str = ""
    over: bool = False  # above the budget
    bar: Strip | None = None  # the fraction of the budget


def tiles(report: Report) -> Iterator[Tile]:
    """The most important figures of a run."""
    losses, one, left = numbers(report.curves.losses), step_seconds(report), seconds_left(report)
    used, budget, word = number(report.measured.get("process_bytes")), report.memory, step_word(report)
    if losses:
        yield Tile(f"{verb_of(report).going.capitalize()} loss", loss_text(losses[-1]), f"from {loss_text(losses[0])}")
    yield from best_tiles(report)
    if epochs := report.epochs:
        going = state_of(report) == "running"
        yield Tile(
            "Epoch" if going else "Epochs", f"{epochs + going:,}", f"{epochs:,} over" if going else "rounds of the data"
        )
    yield from ask_room(report, Tile, lambda room: room.tiles(report.of_room))
    if one is not None:
        yield Tile("Speed", rate_text(1 / one, word), f"{seconds_text(one)}, the median {word}")
    if used is not None and (budget is not None or page_of(report).plans_memory):
        over = budget is not None and used > budget
        yield Tile(
            "Memory",
            bytes_text(used),
            "" if budget is None else f"{'above the' if over else 'of'} {bytes_text(budget)}",
            over,
        )
    found = clock_of(report)
    trained = found.trained if found else None
    if state_of(report) == "running" and left is not None:
        yield Tile("Time left, about", about(left), f"{about(trained)} so far" if trained is not None else "")
    elif trained:
        yield Tile(
            f"{verb_of(report).going.capitalize()} time",
            about(trained),
            f"and {about(found.planning)} of planning" if found and found.planning >= 0.5 else "",
        )


def best_tiles(report: Report) -> Iterator[Tile]:
    """The best validation: its loss and the first of the job's own metrics."""
    best = report.best
    if best is None:
        return
    at = f"best, {step_word(report)} {best.step:,}"
    known = {name: value for name in metric_names(report) if (value := number(best.metrics.get(name))) is not None}
    for name in [name for name in known if name == HELD_OUT] + [name for name in known if name != HELD_OUT][:1]:
        yield Tile("Held-out loss" if name == HELD_OUT else name[:30].capitalize(), loss_text(known[name]), at)
