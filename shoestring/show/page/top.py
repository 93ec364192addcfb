"""The top of the page: what state the run is in, where it stands, and the four figures one looks at first."""
from __future__ import annotations

from collections.abc import Iterator

from shoestring.core.units import bytes_text, seconds_text
from shoestring.show.page.drawing import strip
from shoestring.show.page.words import (
    STATES,
    Told,
    about,
    clock,
    counted,
    dicts,
    figure_of,
    glued,
    headline,
    inner,
    job_text,
    lines,
    loss_text,
    number,
    numbers,
    pace,
    rate_text,
    said,
    seconds_left,
    share_done,
    state_of,
    warnings_in,
    whole,
)

MOST_FLAGS = 16


def top(story: Told) -> str:
    return (f'<header class="wide" data-title="{title(story)}">\n<h1>{pills(story)}<b>{job_text(story)}</b>{flags(story)}</h1>\n'
            f'<p class="verdict">{glued(said(headline(story)))}</p>\n'
            f"{banner(story)}{progress(story)}{tiles(story)}{gauge(story)}</header>")


def title(story: Told) -> str:
    """What the browser's tab says.

    >>> title({"job": "gpt", "state": "training", "step": 3, "steps": 10})
    'Training 30 % · gpt · shoestring'
    """
    state, share = state_of(story), share_done(story)
    stands = f"{STATES[state]} {100 * share:.0f} %" if state == "training" and share else STATES.get(state, "")
    return " · ".join(word for word in (stands, job_text(story), "shoestring") if word)


def pills(story: Told) -> str:
    warned = warnings_in(story)
    return state_pill(story) + (f'<span class="pill warned">{counted(warned, "warning")}</span>' if warned else "")


def state_pill(story: Told) -> str:
    state = state_of(story)
    return f'<span class="pill {state}">{STATES[state]}</span>' if state else ""


def flags(story: Told) -> str:
    found = list(inner(story, "flags").items())
    shown = "".join(f"<span>{said(f'{name} {value}', 60)}</span>" for name, value in found[:MOST_FLAGS])
    return shown + (f"<span>and {len(found) - MOST_FLAGS} more</span>" if len(found) > MOST_FLAGS else "")


def banner(story: Told) -> str:
    """Why it stands where it does, as the run or its folder says it."""
    state, text = state_of(story), str(story.get("text") or "").strip()
    if not text:
        return ""
    last = f'<span class="last">Last sign of life: {clock(story.get("last"), story.get("now"))}</span>' if state == "died" else ""
    return f'<p class="banner {state}">{glued(said(text, 2000))}{last}</p>\n'


def progress(story: Told) -> str:
    """How far it is, and how much of that is safe in a checkpoint."""
    share, state = share_done(story), state_of(story)
    if share is None or state in ("planning", "finished", ""):
        return ""
    saved = min(whole(story, "step"), max((whole(one, "step") for one in dicts(story.get("checkpoints"))), default=0))
    safe, tone = saved / whole(story, "steps"), "forward" if state == "training" else "other"
    note = saved_text(whole(story, "step"), saved)
    bar = strip(f"{100 * share:.0f} % done. {note}", [(0, safe, tone), (safe, share, f"{tone} pale")])
    return f'<div class="progress">{bar}<p><b>{100 * share:.0f}&nbsp;%</b> <span>{note}</span></p></div>\n'


def saved_text(step: int, saved: int) -> str:
    """What a crash would cost, or did.

    >>> saved_text(30, 20), saved_text(30, 30)
    ('Saved up to step 20; 10 steps have come since.', 'Saved up to here.')
    """
    if not saved:
        return "No checkpoint so far."
    return f"Saved up to step {saved:,}; {counted(step - saved, 'step')} have come since." if saved < step else "Saved up to here."


def tiles(story: Told) -> str:
    """The figures one looks at first, big."""
    found = [f"<div><dt>{name}</dt><dd>{glued(value)}</dd><dd>{glued(note)}</dd></div>" for name, value, note in facts(story)]
    return f'<dl class="tiles">\n{lines(found)}</dl>\n' if found and state_of(story) else ""


def facts(story: Told) -> Iterator[tuple[str, str, str]]:
    """Name, figure and a word on it."""
    losses, one, left = numbers(story.get("losses")), pace(story), seconds_left(story)
    used, budget = figure_of(story, "measured", "process_bytes"), figure_of(story, "budget", "memory")
    begun, last = number(story.get("begun")), number(story.get("last"))
    if losses:
        yield "Loss", loss_text(losses[-1]), f"from {loss_text(losses[0])}"
    if one is not None:
        yield "Speed", rate_text(1 / one), f"{seconds_text(one)} a step"
    if used is not None:
        over = budget is not None and used > budget
        size = f'<span class="over">{bytes_text(used)}</span>' if over else bytes_text(used)
        yield "Memory", size, "" if budget is None else f"above the {bytes_text(budget)}" if over else f"of {bytes_text(budget)}"
    if state_of(story) == "training" and left is not None:
        yield "Time left", f"about {about(left)}", f"{about(last - begun)} so far" if begun is not None and last is not None else ""
    elif begun is not None and last is not None and last > begun:
        yield "Time", about(last - begun), f"begun {clock(begun, story.get('now'))}"


def gauge(story: Told) -> str:
    """This run and plain training on one scale, with the budget across."""
    budget = figure_of(story, "budget", "memory")
    used = figure_of(story, "measured", "process_bytes")
    found = [("This run", used, "alert" if used and budget and used > budget else "update"),
             ("Plain training", figure_of(story, "plain", "process_bytes"), "other")]
    rows = [(name, size, tone) for name, size, tone in found if size]
    if not rows:
        return ""
    most = max([size for _, size, _ in rows] + [1.02 * (budget or 0)])
    bars = (f"<p><span>{name}</span><b>{bytes_text(size)}</b></p>"
            + strip(f"{name}: {bytes_text(size)}", [(0, size / most, tone)], budget / most if budget else None)
            for name, size, tone in rows)
    note = f'<p class="note">budget {bytes_text(budget)}</p>\n' if budget else ""
    return '<div class="gauge">\n' + lines(f"<div>{bar}</div>" for bar in bars) + note + "</div>\n"
