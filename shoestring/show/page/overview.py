"""Several runs at a glance: a card for each, that leads to its page."""
from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from markupsafe import Markup

from shoestring.core.units import bytes_text
from shoestring.show.page.drawing import Strip, mean, spark_path, strip, thin
from shoestring.show.page.render import render
from shoestring.show.page.words import (
    ENDED_EARLY,
    STATES,
    Entries,
    counted,
    figure_of,
    headline,
    job_text,
    listed,
    loss_text,
    numbers,
    pace,
    rate_text,
    share_done,
    state_of,
    steps_done,
    warnings_in,
)

MOST_CARDS = 48   # what keeps the page small


def overview(cards: Sequence[Markup], states: Sequence[str]) -> Markup:
    """What stands inside <main>, given the cards of all runs and their states."""
    stand = ", ".join(f"{states.count(state)} {state}" for state in STATES if state in states)
    return render("overview.html", name=counted(len(cards), "run"), stand=stand, cards=cards[:MOST_CARDS], more=len(cards) - MOST_CARDS)


def card(story: Entries, name: str) -> Markup:
    """One run: its state, where it stands, its loss and three figures."""
    state, warned = state_of(story), warnings_in(story)
    return render("card.html", place=quote(name, safe=""), name=name, state=state, word=STATES.get(state, ""), job=job_text(story),
                  stand=stands(story), warned=counted(warned, "warning") if warned else "", bar=bar(story), spark=spark(story),
                  facts=facts(story))


def stands(story: Entries) -> str:
    sentence = f"Trained {counted(steps_done(story), 'step')}." if state_of(story) == "finished" else headline(story)
    return sentence[0].lower() + sentence[1:]


def bar(story: Entries) -> Strip | None:
    share, state = share_done(story), state_of(story)
    if share is None or state == "planning":
        return None
    tone = "update" if state == "finished" else "other" if state in ENDED_EARLY else "forward"
    return strip(f"{100 * share:.0f} % done", [(0, share, tone)])


def spark(story: Entries) -> dict[str, str]:
    """The loss as a small curve; nothing where there is none."""
    points = thin(listed(story.get("losses")), mean, most=60)
    return {"label": f"Loss, now {loss_text(points[-1][1])}", "path": spark_path(points)} if len(points) > 1 else {}


def facts(story: Entries) -> list[tuple[str, str]]:
    losses, one, used = numbers(story.get("losses")), pace(story), figure_of(story, "measured", "process_bytes")
    found = [("Loss", loss_text(losses[-1]) if losses else ""), ("Speed", rate_text(1 / one) if one else ""),
             ("Memory", bytes_text(used) if used is not None else "")]
    return [(name, text) for name, text in found if text]
