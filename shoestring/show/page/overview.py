"""Several runs at a glance: a card for each, that leads to its page."""
from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from shoestring.core.units import bytes_text
from shoestring.show.page.drawing import mean, spark, strip, thin
from shoestring.show.page.top import state_pill
from shoestring.show.page.words import (
    ENDED_EARLY,
    STATES,
    Told,
    counted,
    figure_of,
    glued,
    headline,
    job_text,
    lines,
    listed,
    loss_text,
    numbers,
    pace,
    rate_text,
    said,
    share_done,
    state_of,
    steps_done,
    warnings_in,
)

MOST_CARDS = 48   # what keeps the page small


def overview(cards: Sequence[str], states: Sequence[str]) -> str:
    """What stands inside <main>, given the cards of all runs and their states."""
    name = counted(len(cards), "run")
    stand = ", ".join(f"{states.count(state)} {state}" for state in STATES if state in states)
    rest = f'<p class="note wide">and {len(cards) - MOST_CARDS:,} more: name fewer runs to see them</p>\n'
    return (f'<header class="wide" data-title="{name} · shoestring">\n<h1 class="verdict">{name}</h1>\n<p class="note">{stand}</p>\n'
            f'</header>\n<div class="cards wide">\n{lines(cards[:MOST_CARDS])}</div>\n' + (rest if len(cards) > MOST_CARDS else ""))


def card(story: Told, name: str) -> str:
    """One run: its state, where it stands, its loss and three figures."""
    place, stand = quote(name, safe=""), glued(said(stands(story)))
    return (f'<a class="card" href="/run/{place}">\n<h2><b>{said(name, 80)}</b>{state_pill(story)}</h2>\n'
            f'<p class="stands">{job_text(story)}: {stand}{warned(story)}</p>\n{bar(story)}{loss_line(story)}{facts(story)}</a>')


def stands(story: Told) -> str:
    sentence = f"Trained {counted(steps_done(story), 'step')}." if state_of(story) == "finished" else headline(story)
    return sentence[0].lower() + sentence[1:]


def warned(story: Told) -> str:
    count = warnings_in(story)
    return f' <b class="warned">{counted(count, "warning")}.</b>' if count else ""


def bar(story: Told) -> str:
    share, state = share_done(story), state_of(story)
    if share is None or state == "planning":
        return ""
    tone = "update" if state == "finished" else "other" if state in ENDED_EARLY else "forward"
    return f'<div class="bar">{strip(f"{100 * share:.0f} % done", [(0, share, tone)])}</div>\n'


def loss_line(story: Told) -> str:
    points = thin(listed(story.get("losses")), mean, most=60)
    return spark(f"Loss, now {loss_text(points[-1][1])}", points, "forward") + "\n" if len(points) > 1 else ""


def facts(story: Told) -> str:
    losses, one, used = numbers(story.get("losses")), pace(story), figure_of(story, "measured", "process_bytes")
    found = [("Loss", loss_text(losses[-1]) if losses else ""), ("Speed", rate_text(1 / one) if one else ""),
             ("Memory", bytes_text(used) if used is not None else "")]
    rows = [f"<div><dt>{name}</dt><dd>{glued(text)}</dd></div>" for name, text in found if text]
    return f"<dl>{''.join(rows)}</dl>\n" if rows else ""
