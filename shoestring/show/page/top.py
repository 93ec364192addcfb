"""The top of the page: what state the run is in, where it stands, and the four figures one looks at first."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from markupsafe import Markup

from shoestring.core.units import about, bytes_text, seconds_text
from shoestring.show.page.curves import HELD_OUT, metric_names
from shoestring.show.page.drawing import Strip, strip
from shoestring.show.page.render import render
from shoestring.show.page.standing import headline, standing
from shoestring.show.page.times import clock_of
from shoestring.show.page.words import (
    Entries,
    clock,
    counted,
    dicts,
    figure_of,
    inner,
    job_text,
    loss_text,
    number,
    numbers,
    pace,
    rate_text,
    seconds_left,
    share_done,
    state_of,
    warnings_in,
    whole,
)

MOST_FLAGS = 16


@dataclass(frozen=True)
class Tile:
    """A figure that one looks at first, and a word on it."""

    name: str
    figure: str
    note: str = ""
    over: bool = False   # above the budget


@dataclass(frozen=True)
class Progress:
    """How far it is, and how much of that is safe in a checkpoint."""

    bar: Strip
    percent: str
    note: str


def top(story: Entries) -> Markup:
    stands, warned = standing(story), warnings_in(story)
    flags = [f"{name} {value}" for name, value in inner(story, "flags").items()]
    return render(
        "top.html", title=title(story), stands=stands, warned=counted(warned, "warning") if warned else "",
        job=job_text(story), flags=flags[:MOST_FLAGS], more_flags=len(flags) - MOST_FLAGS, headline=headline(story),
        last_sign=clock(story.get("last"), story.get("now")) if stands.tone == "died" else "",
        progress=progress(story), tiles=list(tiles(story)) if state_of(story) else [])


def title(story: Entries) -> Markup:
    """What the browser's tab says.

    >>> str(title({"job": "gpt", "state": "training", "step": 3, "steps": 10}))
    'Training 30 % · gpt · shoestring'
    """
    word, share = standing(story).word, share_done(story)
    stands = f"{word} {100 * share:.0f} %" if state_of(story) == "training" and share else word
    return Markup(" · ").join(word for word in (stands, job_text(story), "shoestring") if word)


def progress(story: Entries) -> Progress | None:
    share, state = share_done(story), state_of(story)
    if share is None or state in ("planning", "finished", ""):
        return None
    tones = {"training": "forward", "diverged": "alert", "failed": "alert", "died": "alert"}
    saved = min(whole(story, "step"), max((whole(one, "step") for one in dicts(story.get("checkpoints"))), default=0))
    safe, tone = saved / whole(story, "steps"), tones.get(standing(story).tone, "other")
    note = saved_text(whole(story, "step"), saved)
    bar = strip(f"{100 * share:.0f} % done. {note}", [(0, safe, tone), (safe, share, f"{tone} pale")])
    return Progress(bar, f"{100 * share:.0f} %", note)


def saved_text(step: int, saved: int) -> str:
    """What a crash would cost, or did.

    >>> saved_text(30, 20), saved_text(30, 30)
    ('Saved up to step 20; 10 steps have come since.', 'Saved up to here.')
    """
    if not saved:
        return "No checkpoint so far."
    return f"Saved up to step {saved:,}; {counted(step - saved, 'step')} have come since." if saved < step else "Saved up to here."


def tiles(story: Entries) -> Iterator[Tile]:
    """The figures one looks at first, big."""
    losses, one, left = numbers(story.get("losses")), pace(story), seconds_left(story)
    used, budget = figure_of(story, "measured", "process_bytes"), figure_of(story, "budget", "memory")
    if losses:
        yield Tile("Training loss", loss_text(losses[-1]), f"from {loss_text(losses[0])}")
    yield from best_tiles(story)
    if epochs := whole(story, "epochs"):
        going = state_of(story) == "training"
        yield Tile("Epoch" if going else "Epochs", f"{epochs + going:,}", f"{epochs:,} over" if going else "rounds of the data")
    if one is not None:
        yield Tile("Speed", rate_text(1 / one), f"{seconds_text(one)} a step")
    if used is not None:
        over = budget is not None and used > budget
        yield Tile("Memory", bytes_text(used), "" if budget is None else f"{'above the' if over else 'of'} {bytes_text(budget)}", over)
    found = clock_of(story)
    trained = found.trained if found else None
    if state_of(story) == "training" and left is not None:
        yield Tile("Time left, about", about(left), f"{about(trained)} so far" if trained is not None else "")
    elif trained:
        yield Tile("Training time", about(trained), f"and {about(found.planning)} of planning" if found and found.planning >= 0.5 else "")


def best_tiles(story: Entries) -> Iterator[Tile]:
    """The best validation: its loss and the first of the job's own metrics."""
    best = inner(story, "best")
    at = f"best, step {whole(best, 'step'):,}"
    names = [name for name in metric_names(story) if number(best.get(name)) is not None]
    for name in [name for name in names if name == HELD_OUT] + [name for name in names if name != HELD_OUT][:1]:
        yield Tile("Held-out loss" if name == HELD_OUT else name[:30].capitalize(), loss_text(best[name]), at)
