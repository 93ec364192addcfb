"""The sections made of words: the plan and those not taken, checkpoints, events, the result, and the small print."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby

from shoestring.core.exactness import stated_in
from shoestring.core.units import bytes_text, seconds_text
from shoestring.show.page.words import (
    NONE,
    Told,
    clock,
    counted,
    dicts,
    glued,
    inner,
    lines,
    number,
    percent,
    said,
    section,
    warnings_in,
    whole,
)

MOST_ROWS, MOST_EVENTS, MOST_CHECKPOINTS, MOST_TEXT = 12, 30, 5, 8000   # what keeps the page small


def plan(story: Told) -> str:
    """The techniques, and why each is there."""
    if story.get("techniques") is None:
        return ""
    rows = [f"<li><code>{said(technique_text(one))}</code><p>{said(one.get('why') or '')}</p></li>"
            for one in dicts(story["techniques"])[:MOST_ROWS]]
    level = stated_in(story)
    note = f"{level.word.capitalize()}: {level.meaning}." if level is not None else ""
    body = f'<ul class="rows">\n{lines(rows)}</ul>' if rows else "<p>Plain training, no technique.</p>"
    return section("The plan", note, body)


def technique_text(one: Told) -> str:
    """A technique as one would write it.

    >>> technique_text({"name": "Checkpoint", "knobs": {"every": 2}})
    'Checkpoint(every=2)'
    """
    knobs = ", ".join(f"{name}={value}" for name, value in inner(one, "knobs").items())
    return f"{one.get('name') or 'technique'}({knobs})" if knobs else str(one.get("name") or "technique")


def runners_up(story: Told) -> str:
    """The plans that were not taken."""
    found = dicts(story.get("runners_up"))
    rows = [f"<li><code>{said(one.get('text') or 'plain')}</code><p>{runner_text(one)}</p></li>" for one in found[:MOST_ROWS]]
    rows += [f"<li><p>and {len(found) - MOST_ROWS:,} more</p></li>"] if len(found) > MOST_ROWS else []
    return section("Runners-up, and why they lost", "", f'<ul class="rows">\n{lines(rows)}</ul>') if rows else ""


def runner_text(one: Told) -> str:
    size, seconds = number(one.get("process_bytes")), number(one.get("step_seconds"))
    told = [f"<b>{said(one['lost'])}</b>" if one.get("lost") else "", bytes_text(size) if size is not None else "",
            f"{seconds_text(seconds)} a step" if seconds is not None else ""]
    return glued(" · ".join(word for word in told if word))


def checkpoints(story: Told) -> str:
    """Where the run can go on from, newest first."""
    found = dicts(story.get("checkpoints"))
    if not found:
        return ""
    rows = [f"<tr><th scope=\"row\">{whole(one, 'step'):,}</th><td>{figure(one, 'bytes')}</td><td>{figure(one, 'seconds')}</td>"
            f"<td>{clock(one.get('time'), story.get('now'))}</td></tr>" for one in found[: -MOST_CHECKPOINTS - 1 : -1]]
    stood = sum(number(one.get("seconds")) or 0.0 for one in found)
    begun, last = (number(story.get(key)) for key in ("begun", "last"))
    share = f", {percent(stood / (last - begun))[1:]} of its time" if begun is not None and last is not None and last > begun else ""
    note = f"{counted(len(found), 'checkpoint')} saved; training stood still for {seconds_text(stood)} in all{share}."
    note += f" The newest {MOST_CHECKPOINTS}:" if len(found) > MOST_CHECKPOINTS else ""
    head = "".join(f'<th scope="col">{name}</th>' for name in ("Step", "Size", "Stood still", "Saved"))
    return section("Checkpoints", note, f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{lines(rows)}</tbody>\n</table>")


def figure(one: Told, key: str) -> str:
    value = number(one.get(key))
    return NONE if value is None else bytes_text(value) if key == "bytes" else seconds_text(value)


def events(story: Told) -> str:
    """What happened, newest first; checkpoints in a row are told as one."""
    found = dicts(story.get("events"))
    grouped = [list(group) for _, group in groupby(found, lambda event: event.get("event") == "saved" or id(event))]
    now, newest = story.get("now"), grouped[: -MOST_EVENTS - 1 : -1]
    rows = [f'<li class="{tone_of(group[-1])}"><span>{clock(group[-1].get("time"), now)}</span><p>{glued(told(group))}</p></li>'
            for group in newest]
    earlier = len(grouped) - len(rows)
    rows += [f"<li><span></span><p>and {earlier:,} earlier</p></li>"] if earlier > 0 else []
    warned = warnings_in(story)
    note = ("Newest first." if len(rows) > 1 else "") + (f" {counted(warned, 'warning')}." if warned else "")
    return section("What happened", note, f'<ul class="events">\n{lines(rows)}</ul>') if rows else ""


def tone_of(event: Told) -> str:
    return {"warning": "warned", "died": "warned", "failed": "failed"}.get(str(event.get("event")), "")


def told(group: list[Told]) -> str:
    """A line about an event, or about checkpoints that followed each other."""
    event = group[-1]
    if len(group) > 1:
        return f"Saved {counted(len(group), 'checkpoint')}, the last at step {whole(event, 'step'):,}"
    return ". ".join(sentence for sentence in sentences(event) if sentence)


def sentences(event: Told) -> Iterator[str]:
    kind, step, text = str(event.get("event")), whole(event, "step"), said(event.get("text") or "", 600)
    memory, how, found = number(event.get("memory")), said(event.get("how") or ""), event.get("differences")
    if kind == "planning":
        yield "Planning" + (f" for {bytes_text(memory)}" if memory else "")
    elif kind == "begun":
        yield f"Training goes on from step {step:,}" if step else f"Training begins, {counted(whole(event, 'steps'), 'step')} to do"
        yield how
    elif kind == "saved":
        yield f"Saved a checkpoint at step {step:,}, {figure(event, 'bytes')} in {figure(event, 'seconds')}"
    elif kind == "adopted":
        changes = found if isinstance(found, list | tuple) else list(found) if isinstance(found, Mapping) else [found or ""]
        yield "Goes on with changes: " + said("; ".join(str(change) for change in changes), 600)
    elif kind == "finished":
        yield f"Finished at step {step:,}"
    elif kind == "stopped":
        yield f"Stopped at step {step:,}"
        yield text
    elif kind in ("died", "re-formed"):
        yield text[:1].upper() + text[1:]
    elif kind in ("warning", "failed"):
        yield f"<b>{kind.capitalize()}</b> {text}"
    else:
        yield said(kind, 60)
        yield text


def shown(story: Told) -> str:
    """What the job has to show for it."""
    text = str(story.get("shown") or "").strip("\n")
    note = f"The first of {len(text):,} characters." if len(text) > MOST_TEXT else ""
    return section("A look at the result", note, f'<pre tabindex="0">{said(text, MOST_TEXT)}</pre>') if text else ""


def footer(story: Told) -> str:
    weights = f"sha256 {story['weights_sha256']}" if story.get("weights_sha256") else ""
    begun = clock(story.get("begun")) if number(story.get("begun")) is not None else ""
    process = story.get("pid")
    facts = [("Run", story.get("run"), ""), ("Begun", begun, ""), ("Process", process, ""), ("Weights", weights, ' class="hash"'),
             ("How sure", story.get("sure"), "")]
    rows = [f"<dt>{name}</dt><dd{kind}>{said(value, 600)}</dd>" for name, value, kind in facts if value]
    return '<footer class="wide">' + (f"<dl>\n{lines(rows)}</dl>" if rows else "shoestring") + "</footer>"
