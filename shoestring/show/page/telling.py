"""The sections made of words: the plan and those not taken, checkpoints, events, the result, and the small print."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup

from shoestring.core.exactness import stated_in
from shoestring.core.units import bytes_text, seconds_text
from shoestring.planning.spelling import technique_text
from shoestring.show.page.render import NONE, render, said
from shoestring.show.page.times import clock_of
from shoestring.show.page.words import (
    Entries,
    clock,
    counted,
    dicts,
    inner,
    loss_text,
    number,
    share_text,
    step_word,
    warnings_in,
    whole,
)

IN_A_ROW = ("saved", "validated")  # events that are told as one if they follow each other
MOST_ROWS, MOST_EVENTS, MOST_CHECKPOINTS, MOST_TEXT = 10, 24, 5, 6000  # what keeps the page small


@dataclass(frozen=True)
class PlanRow:
    text: str  # a technique or a plan, as one would write it
    why: str = ""  # it is there
    lost: str = ""  # why it was not taken
    figures: tuple[str, ...] = ()


@dataclass(frozen=True)
class CheckpointRow:
    step: int
    size: float | None  # bytes
    seconds: float | None  # that training stood still
    saved: str
    best: bool


@dataclass(frozen=True)
class EventRow:
    when: str
    tone: str
    strong: str
    text: Markup


def plan(story: Entries) -> Markup:
    """The techniques, and why each is there."""
    if story.get("techniques") is None:
        return Markup()
    rows = [PlanRow(technique_text(one), str(one.get("why") or "")) for one in dicts(story["techniques"])[:MOST_ROWS]]
    level = stated_in(story)
    return render(
        "plan.html",
        note=f"{level.word.capitalize()}: {level.meaning}." if level is not None else "",
        rows=rows,
        plain="The plain round" if step_word(story) == "round" else "Plain training",
    )


def runners_up(story: Entries) -> Markup:
    """The plans that were not taken."""
    found = dicts(story.get("runners_up"))
    rows = [
        PlanRow(str(one.get("text") or "plain"), "", str(one.get("lost") or ""), tuple(figures(one, step_word(story))))
        for one in found[:MOST_ROWS]
    ]
    return render("runners_up.html", rows=rows, more=len(found) - MOST_ROWS) if rows else Markup()


def figures(one: Entries, word: str = "step") -> Iterator[str]:
    """What is known of a plan."""
    size, seconds, up = (number(one.get(name)) for name in ("process_bytes", f"{word}_seconds", "up_bytes"))
    if size is not None:
        yield bytes_text(size)
    if seconds is not None:
        yield f"{seconds_text(seconds)} a {word}"
    if up is not None:
        yield f"{bytes_text(up)} up, a device"


def checkpoints(story: Entries) -> Markup:
    """Where the run can go on from, newest first: those that are on disk now."""
    found = dicts(story.get("checkpoints"))
    if not found:
        return Markup()
    now = story.get("now")
    newest = list({whole(one, "step"): one for one in found if one.get("kept", True)}.values())[::-1]  # one of a step
    rows = [
        CheckpointRow(
            whole(one, "step"),
            number(one.get("bytes")),
            number(one.get("seconds")),
            clock(one.get("time"), now),
            one.get("best") is True,
        )
        for one in newest[:MOST_CHECKPOINTS]
    ]
    stood, trained = sum(number(one.get("seconds")) or 0.0 for one in found), clock_of(story)
    share = (
        f", {share_text(stood / trained.trained)} of its time" if trained is not None and trained.trained > 0 else ""
    )
    there = (
        "none is"
        if not newest
        else "it is"
        if len(found) == 1
        else f"{len(newest):,} of them {'is' if len(newest) == 1 else 'are'}"
    )
    note = f"{counted(len(found), 'checkpoint')} saved, {there} on disk now; training stood still for {seconds_text(stood)} in all{share}."
    note += f" The newest {MOST_CHECKPOINTS}:" if len(newest) > MOST_CHECKPOINTS else ""
    return render("checkpoints.html", note=note, word=step_word(story), rows=rows)


def events(story: Entries) -> Markup:
    """What happened, newest first; checkpoints and validations in a row are told as one."""
    found = dicts(story.get("events"))
    grouped = [list(group) for _, group in groupby(found, lambda event: event.get("event") in IN_A_ROW or id(event))]
    now, newest, word = story.get("now"), grouped[: -MOST_EVENTS - 1 : -1], step_word(story)
    rows = [
        EventRow(clock(group[-1].get("time"), now), tone_of(group[-1]), strong(group[-1]), event_line(group, word))
        for group in newest
    ]
    earlier, warned = len(grouped) - len(rows), warnings_in(story)
    note = ("Newest first." if len(rows) + (earlier > 0) > 1 else "") + (
        f" {counted(warned, 'warning')}." if warned else ""
    )
    return render("events.html", note=note, rows=rows, earlier=earlier) if rows else Markup()


def tone_of(event: Entries) -> str:
    return {"warning": "warned", "died": "warned", "failed": "failed"}.get(str(event.get("event")), "")


def strong(event: Entries) -> str:
    """The word that stands out before an event that is bad news."""
    return {"warning": "Warning", "failed": "Failed"}.get(str(event.get("event")), "")


def event_line(group: list[Entries], word: str) -> Markup:
    """A line about an event, or about checkpoints that followed each other."""
    event = group[-1]
    if len(group) > 1:
        saved = sum(one.get("event") == "saved" for one in group)
        tried = len(group) - saved
        done = [f"validated {tried:,} time{'s' * (tried != 1)}"] * bool(tried) + [
            f"saved {counted(saved, 'checkpoint')}"
        ] * bool(saved)
        return said(f"{' and '.join(done).capitalize()}, the last at {word} {whole(event, 'step'):,}")
    return Markup(". ").join(sentence[:1].upper() + sentence[1:] for sentence in sentences(event, word) if sentence)


def sentences(event: Entries, word: str) -> Iterator[str]:
    kind, step, text = str(event.get("event")), whole(event, "step"), said(event.get("text") or "", 400)
    memory, how, found = number(event.get("memory")), said(event.get("how") or ""), event.get("differences")
    if kind == "planning":
        yield "Planning" + (f" for {bytes_text(memory)}" if memory else "")
    elif kind == "begun":
        yield (
            f"Training goes on from {word} {step:,}"
            if step
            else f"Training begins, {counted(whole(event, 'steps'), word)} to do"
        )
        yield how
    elif kind == "saved":
        yield f"Saved a checkpoint at {word} {step:,}, {known(event, 'bytes')} in {known(event, 'seconds')}"
    elif kind == "validated":
        metrics = event.get("metrics")
        found = metrics.items() if isinstance(metrics, Mapping) else ()
        told = ", ".join(f"{name} {NONE if number(value) is None else f'{number(value):.4g}'}" for name, value in found)
        yield said(f"Validated after {word} {step:,}: {told}{', the best so far' * bool(event.get('best'))}", 600)
    elif kind == "adopted":
        changes = (
            found if isinstance(found, list | tuple) else list(found) if isinstance(found, Mapping) else [found or ""]
        )
        yield said("Goes on with changes: ") + said("; ".join(str(change) for change in changes), 600)
    elif kind == "validated":
        metrics = [
            f"{name} {loss_text(value)}" for name, value in inner(event, "metrics").items() if number(value) is not None
        ]
        yield said(f"Validated at {word} {step:,}: {', '.join(metrics[:5]) or 'no number'}")
        yield "The best so far" if event.get("best") is True else ""
    elif kind == "finished":
        ended = str(event.get("ended") or "steps")
        yield f"Finished at {word} {step:,}" + ("" if ended in ("steps", f"{word}s") else said(f": {ended}"))
    elif kind == "stopped":
        yield text or f"Stopped at {word} {step:,}"
    elif kind in ("died", "re-formed", "warning", "failed"):
        yield text
    else:
        yield said(kind, 60)
        yield text


def known(event: Entries, key: str) -> str:
    value = number(event.get(key))
    return NONE if value is None else bytes_text(value) if key == "bytes" else seconds_text(value)


def shown(story: Entries) -> Markup:
    """What the job has to show for it."""
    text = str(story.get("shown") or "").strip("\n")
    note = f"The first of {len(text):,} characters." if len(text) > MOST_TEXT else ""
    return render("shown.html", note=note, text=text, most=MOST_TEXT) if text else Markup()


def footer(story: Entries) -> Markup:
    weights = f"sha256 {story['weights_sha256']}" if story.get("weights_sha256") else ""
    begun = clock(story.get("begun")) if number(story.get("begun")) is not None else ""
    facts = [
        ("Run", story.get("run")),
        ("Begun", begun),
        ("Process", story.get("pid")),
        ("Weights", weights),
        ("How sure", story.get("sure")),
    ]
    return render("footer.html", facts=[(name, value) for name, value in facts if value])
