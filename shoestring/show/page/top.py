"""The top of the page: what state the run is in, where it stands, and the four figures one looks at first."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from shoestring.show.page.drawing import Strip, strip
from shoestring.show.page.render import render
from shoestring.show.page.standing import headline, standing
from shoestring.show.page.tiles import tiles
from shoestring.show.page.words import (
    Entries,
    clock,
    counted,
    dicts,
    flags_of,
    job_text,
    share_done,
    state_of,
    step_word,
    warnings_in,
    whole,
)

MOST_FLAGS = 16


@dataclass(frozen=True)
class ProgressBar:
    """How far it is, and how much of that is safe in a checkpoint."""

    bar: Strip
    percent: str
    note: str


def top(story: Entries) -> Markup:
    stands, warned = standing(story), warnings_in(story)
    flags = [f"{name} {value}" for name, value in flags_of(story).items()]
    return render(
        "top.html",
        title=title(story),
        stands=stands,
        warned=counted(warned, "warning") if warned else "",
        job=job_text(story),
        flags=flags[:MOST_FLAGS],
        more_flags=len(flags) - MOST_FLAGS,
        headline=headline(story),
        last_sign=clock(story.get("last"), story.get("now")) if stands.tone == "died" else "",
        progress=progress(story),
        tiles=list(tiles(story)) if state_of(story) else [],
    )


def title(story: Entries) -> Markup:
    """What the browser's tab says.

    >>> str(title({"job": "gpt", "state": "training", "step": 3, "steps": 10}))
    'Training 30 % · gpt · shoestring'
    """
    word, share = standing(story).word, share_done(story)
    stands = f"{word} {100 * share:.0f} %" if state_of(story) == "training" and share else word
    return Markup(" · ").join(word for word in (stands, job_text(story), "shoestring") if word)


def progress(story: Entries) -> ProgressBar | None:
    share, state = share_done(story), state_of(story)
    if share is None or state in ("planning", "finished", ""):
        return None
    tones = {"training": "forward", "diverged": "alert", "failed": "alert", "died": "alert"}
    saved = min(whole(story, "step"), max((whole(one, "step") for one in dicts(story.get("checkpoints"))), default=0))
    safe, tone = saved / whole(story, "steps"), tones.get(standing(story).tone, "other")
    note = saved_text(whole(story, "step"), saved, step_word(story))
    bar = strip(f"{100 * share:.0f} % done. {note}", [(0, safe, tone), (safe, share, f"{tone} pale")])
    return ProgressBar(bar, f"{100 * share:.0f} %", note)


def saved_text(step: int, saved: int, word: str = "step") -> str:
    """What a crash would cost, or did.

    >>> saved_text(30, 20), saved_text(30, 30)
    ('Saved up to step 20; 10 steps have come since.', 'Saved up to here.')
    """
    if not saved:
        return "No checkpoint so far."
    return (
        f"Saved up to {word} {saved:,}; {counted(step - saved, word)} have come since."
        if saved < step
        else "Saved up to here."
    )
