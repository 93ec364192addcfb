"""The sections made of text: the plan and its alternatives, checkpoints, events, the result, and details."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from markupsafe import Markup

from shoestring.core.figures import Quantity
from shoestring.core.units import bytes_text, seconds_text
from shoestring.runs.events.event import (
    Adopted,
    Begun,
    Died,
    Event,
    Failed,
    Finished,
    Other,
    Planning,
    Reformed,
    Saved,
    Stopped,
    Validated,
    Warned,
)
from shoestring.runs.reports.plan_summary import LostPlan, UsedTechnique
from shoestring.runs.reports.report import Report
from shoestring.show.page.render import NONE, escape_cut, render
from shoestring.show.page.room_page import page_of
from shoestring.show.page.times import clock_of
from shoestring.show.page.words import clock, count_text, number, share_text, step_word, verb_of, warnings_in

MOST_ROWS, MOST_EVENTS, MOST_CHECKPOINTS, MOST_TEXT = 10, 24, 5, 6000  # limits that keep the page small
BAD = {Warned: "Warning", Failed: "Failed"}  # the word shown before bad news
TONES = {Warned: "warned", Died: "warned", Failed: "failed"}


@dataclass(frozen=True)
class PlanRow:
    text: str  # a technique or a plan, as written in `--use`
    why: str = ""  # why it was chosen
    lost: str = ""  # why it lost
    figures: tuple[str, ...] = ()


@dataclass(frozen=True)
class EventRow:
    when: str
    tone: str
    strong: str
    text: Markup


def plan(report: Report) -> Markup:
    """The techniques, and why each was chosen."""
    if report.plan.techniques is None:
        return Markup()
    level = report.exactness
    return render(
        "plan.html",
        note=f"{level.word.capitalize()}: {level.meaning}." if level is not None else "",
        rows=plan_rows(report.plan.techniques[:MOST_ROWS]),
        plain=page_of(report).plain,
    )


def plan_rows(techniques: Sequence[UsedTechnique]) -> list[PlanRow]:
    return [PlanRow(one.text, one.why) for one in techniques]


def runners_up(report: Report) -> Markup:
    """The plans that lost."""
    found = report.plan.runners_up
    rows = [
        PlanRow(one.text or "plain", "", one.lost, tuple(figures(one, report.quantities))) for one in found[:MOST_ROWS]
    ]
    return render("runners_up.html", rows=rows, more=len(found) - MOST_ROWS) if rows else Markup()


def figures(one: LostPlan, quantities: Sequence[Quantity]) -> Iterator[str]:
    """The known figures of a plan."""
    for quantity in quantities:
        value = one.predicted.get(quantity.name)
        if value is not None and not quantity.optional:
            yield f"{quantity.text(value)} {quantity.label}"


def checkpoints(report: Report) -> Markup:
    """Checkpoints that exist now, from which the run can be resumed, newest first."""
    found = report.checkpoints
    if not found:
        return Markup()
    newest = list({one.step: one for one in found if one.checkpoint in report.kept}.values())[::-1]  # one per step
    stood, trained = sum(one.seconds for one in found), clock_of(report)
    share = (
        f", {share_text(stood / trained.trained)} of its time" if trained is not None and trained.trained > 0 else ""
    )
    verb = "is" if len(newest) == 1 else "are"
    there = "none is" if not newest else "it is" if len(found) == 1 else f"{len(newest):,} of them {verb}"
    note = f"{count_text(len(found), 'checkpoint')} saved, {there} on disk now; "
    note += f"{verb_of(report).going} stood still for {seconds_text(stood)} in all{share}."
    note += f" The newest {MOST_CHECKPOINTS}:" if len(newest) > MOST_CHECKPOINTS else ""
    rows = [(one, clock(one.time, report.now)) for one in newest[:MOST_CHECKPOINTS]]
    return render("checkpoints.html", note=note, word=step_word(report), rows=rows)


def events(report: Report) -> Markup:
    """Events, newest first; consecutive checkpoints and validations are shown as one."""
    in_a_row = groupby(report.events, lambda event: isinstance(event, Saved | Validated) or id(event))
    grouped = [list(group) for _, group in in_a_row]
    newest, word = grouped[: -MOST_EVENTS - 1 : -1], step_word(report)
    rows = [
        EventRow(
            clock(group[-1].time, report.now),
            TONES.get(type(group[-1]), ""),
            BAD.get(type(group[-1]), ""),
            event_line(group, word, verb_of(report).going),
        )
        for group in newest
    ]
    earlier, warned = len(grouped) - len(rows), warnings_in(report)
    note = "Newest first." if len(rows) + (earlier > 0) > 1 else ""
    note += f" {count_text(warned, 'warning')}." if warned else ""
    rows = [row for row in rows if row.text]
    return render("events.html", note=note, rows=rows, earlier=earlier) if rows else Markup()


def event_line(group: list[Event], word: str, going: str) -> Markup:
    """A line about an event, or about checkpoints and validations that followed each other."""
    event = group[-1]
    if len(group) > 1 and isinstance(event, Saved | Validated):
        saved = sum(isinstance(one, Saved) for one in group)
        tried = len(group) - saved
        done = [f"validated {count_text(tried, 'time')}"] * bool(tried)
        done += [f"saved {count_text(saved, 'checkpoint')}"] * bool(saved)
        return escape_cut(f"{' and '.join(done).capitalize()}, the last at {word} {event.step:,}")
    return Markup(". ").join(
        sentence[:1].upper() + sentence[1:] for sentence in sentences(event, word, going) if sentence
    )


def sentences(event: Event, word: str, going: str) -> Iterator[Markup | str]:
    match event:
        case Planning():
            yield "Planning" + (f" for {bytes_text(event.memory)}" if event.memory else "")
        case Begun():
            goes_on = f"{going} goes on from {word} {event.step:,}"
            to_do = f", {count_text(event.steps, word)} to do" if event.steps else ""
            yield goes_on if event.step else f"{going} begins{to_do}"
            yield escape_cut(event.how)
        case Saved():
            size, seconds = bytes_text(event.bytes), seconds_text(event.seconds)
            yield f"Saved a checkpoint at {word} {event.step:,}, {size} in {seconds}"
        case Validated():
            told = (f"{name} {NONE if number(one) is None else f'{one:.4g}'}" for name, one in event.metrics.items())
            best = ", the best so far" * event.best
            yield escape_cut(f"Validated after {word} {event.step:,}: {', '.join(told)}{best}", 600)
        case Adopted():
            yield escape_cut("Goes on with changes: ") + escape_cut("; ".join(event.differences), 600)
        case Finished():
            by_itself = event.ended in ("steps", f"{word}s")
            yield f"Finished at {word} {event.step:,}" + ("" if by_itself else escape_cut(f": {event.ended}"))
        case Stopped():
            yield escape_cut(event.text, 400) or f"Stopped at {word} {event.step:,}"
        case Died() | Reformed() | Warned() | Failed():
            yield escape_cut(event.text, 400)
        case Other():
            yield escape_cut(event.told.get("event", ""), 60)
            yield escape_cut(event.told.get("text") or "", 400)
        case _:
            yield escape_cut(event.sentence(), 400)


def shown_text(report: Report) -> Markup:
    """The text of the job's `show`."""
    text = report.result.shown.strip("\n") if report.result is not None else ""
    note = f"The first of {len(text):,} characters." if len(text) > MOST_TEXT else ""
    return render("shown.html", note=note, text=text, most=MOST_TEXT) if text else Markup()


def footer(report: Report) -> Markup:
    facts = [
        ("Run", str(report.path) if report.path != Path() else ""),
        ("Begun", clock(report.begun) if report.begun is not None else ""),
        ("Process", report.pid),
        ("Weights", f"sha256 {report.weights_sha256}" if report.weights_sha256 else ""),
        ("How sure", report.plan.basis),
    ]
    return render("footer.html", facts=[(name, value) for name, value in facts if value])
