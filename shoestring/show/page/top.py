"""The top of the page: what state the run is in, where it stands, and the four figures one looks at first."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from markupsafe import Markup

from shoestring.core.units import about, bytes_text, seconds_text
from shoestring.show.page.drawing import Strip, strip
from shoestring.show.page.render import render
from shoestring.show.page.words import (
    STATES,
    Entries,
    clock,
    counted,
    dicts,
    figure_of,
    headline,
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
class Gauge:
    """Memory of this run or of plain training, on one scale with the budget."""

    name: str
    size: float
    bar: Strip


@dataclass(frozen=True)
class Progress:
    """How far it is, and how much of that is safe in a checkpoint."""

    bar: Strip
    percent: str
    note: str


def top(story: Entries) -> Markup:
    state, warned = state_of(story), warnings_in(story)
    flags = [f"{name} {value}" for name, value in inner(story, "flags").items()]
    return render(
        "top.html", title=title(story), state=state, word=STATES.get(state, ""), warned=counted(warned, "warning") if warned else "",
        job=job_text(story), flags=flags[:MOST_FLAGS], more_flags=len(flags) - MOST_FLAGS, headline=headline(story),
        banner=str(story.get("text") or "").strip(), last_sign=clock(story.get("last"), story.get("now")) if state == "died" else "",
        progress=progress(story), tiles=list(tiles(story)) if state else [], gauge=gauge(story),
        budget=figure_of(story, "budget", "memory"))


def title(story: Entries) -> Markup:
    """What the browser's tab says.

    >>> str(title({"job": "gpt", "state": "training", "step": 3, "steps": 10}))
    'Training 30 % · gpt · shoestring'
    """
    state, share = state_of(story), share_done(story)
    stands = f"{STATES[state]} {100 * share:.0f} %" if state == "training" and share else STATES.get(state, "")
    return Markup(" · ").join(word for word in (stands, job_text(story), "shoestring") if word)


def progress(story: Entries) -> Progress | None:
    share, state = share_done(story), state_of(story)
    if share is None or state in ("planning", "finished", ""):
        return None
    saved = min(whole(story, "step"), max((whole(one, "step") for one in dicts(story.get("checkpoints"))), default=0))
    safe, tone = saved / whole(story, "steps"), "forward" if state == "training" else "other"
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
    begun, last = number(story.get("begun")), number(story.get("last"))
    if losses:
        yield Tile("Loss", loss_text(losses[-1]), f"from {loss_text(losses[0])}")
    if one is not None:
        yield Tile("Speed", rate_text(1 / one), f"{seconds_text(one)} a step")
    if used is not None:
        over = budget is not None and used > budget
        yield Tile("Memory", bytes_text(used), "" if budget is None else f"{'above the' if over else 'of'} {bytes_text(budget)}", over)
    if state_of(story) == "training" and left is not None:
        yield Tile("Time left", f"about {about(left)}", f"{about(last - begun)} so far" if begun is not None and last is not None else "")
    elif begun is not None and last is not None and last > begun:
        yield Tile("Time", about(last - begun), f"begun {clock(begun, story.get('now'))}")


def gauge(story: Entries) -> list[Gauge]:
    """This run and plain training on one scale, with the budget across."""
    budget, used = figure_of(story, "budget", "memory"), figure_of(story, "measured", "process_bytes")
    found = [("This run", used, "alert" if used and budget and used > budget else "update"),
             ("Plain training", figure_of(story, "plain", "process_bytes"), "other")]
    rows = [(name, size, tone) for name, size, tone in found if size]
    most = max([size for _, size, _ in rows] + [1.02 * (budget or 0)])
    return [Gauge(name, size, strip(f"{name}: {bytes_text(size)}", [(0, size / most, tone)], budget / most if budget else None))
            for name, size, tone in rows]
