"""The top of the page: the run's state, its progress, and the four most important figures."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from shoestring.runs.reports.report import Report
from shoestring.show.page.drawings.drawing import Strip, strip
from shoestring.show.page.render import render
from shoestring.show.page.sections.standing import headline, standing
from shoestring.show.page.sections.tiles import tiles
from shoestring.show.page.words import (
    clock,
    count_text,
    flags_of,
    job_text,
    share_done,
    state_of,
    step_word,
    warnings_in,
)

MOST_FLAGS = 16


@dataclass(frozen=True)
class ProgressBar:
    """Progress, and how much of it is saved in a checkpoint."""

    bar: Strip
    percent: str
    note: str


def top(report: Report) -> Markup:
    stands, warned = standing(report), warnings_in(report)
    flags = [f"{name} {value}" for name, value in flags_of(report).items()]
    return render(
        "top.html",
        title=title(report),
        stands=stands,
        warned=count_text(warned, "warning") if warned else "",
        job=job_text(report),
        flags=flags[:MOST_FLAGS],
        more_flags=len(flags) - MOST_FLAGS,
        headline=headline(report),
        last_sign=clock(report.last, report.now) if stands.tone == "died" else "",
        progress=progress(report),
        tiles=list(tiles(report)) if state_of(report) else [],
    )


def title(report: Report) -> Markup:
    """The title of the browser tab.

    >>> from shoestring.runs.request import Request
    >>> str(title(Report(request=Request(job="gpt", room="training"), state="running", step=3, steps=10)))
    'Training 30 % · gpt · shoestring'
    """
    word, share = standing(report).word, share_done(report)
    stands = f"{word} {100 * share:.0f} %" if state_of(report) == "running" and share else word
    return Markup(" · ").join(word for word in (stands, job_text(report), "shoestring") if word)


def progress(report: Report) -> ProgressBar | None:
    share, state = share_done(report), state_of(report)
    if share is None or state in ("planning", "finished", ""):
        return None
    tones = {"running": "forward", "diverged": "alert", "failed": "alert", "died": "alert"}
    saved = min(report.step, max((one.step for one in report.checkpoints), default=0))
    safe, tone = saved / report.steps, tones.get(standing(report).tone, "other")
    note = saved_text(report.step, saved, step_word(report))
    bar = strip(f"{100 * share:.0f} % done. {note}", [(0, safe, tone), (safe, share, f"{tone} pale")])
    return ProgressBar(bar, f"{100 * share:.0f} %", note)


def saved_text(step: int, saved: int, word: str = "step") -> str:
    """What a crash would lose, or lost.

    >>> saved_text(30, 20), saved_text(30, 30)
    ('Saved up to step 20; 10 steps have come since.', 'Saved up to here.')
    """
    if not saved:
        return "No checkpoint so far."
    return (
        f"Saved up to {word} {saved:,}; {count_text(step - saved, word)} have come since."
        if saved < step
        else "Saved up to here."
    )
