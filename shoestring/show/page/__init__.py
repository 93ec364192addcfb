"""The page of a run: no other file, nothing fetched, and as the report at the end no script.

    story (a dict as runs.story tells it, any key may be missing)  ->  sections, each empty if its figures are
        ->  content, what stands inside <main>: sent again and again while a run is watched
        ->  page, one HTML document: the report
"""
from __future__ import annotations

from typing import Any

from shoestring.show.page.document import document
from shoestring.show.page.figures import blocks, comparison, losses, parts, process, throughput
from shoestring.show.page.stale import staleness
from shoestring.show.page.telling import checkpoints, events, footer, plan, runners_up, shown
from shoestring.show.page.top import title, top
from shoestring.show.page.words import lines, wide


def page(story: dict[str, Any]) -> str:
    """The whole document.

    >>> page({"job": "gpt"}).splitlines()[0]
    '<!doctype html>'
    """
    return document(title(story), content(story))


def content(story: dict[str, Any]) -> str:
    """What stands inside <main>."""
    found = (losses, throughput, process, blocks, parts, staleness, plan, runners_up, checkpoints)
    halves = [body for body in (section(story) for section in found) if body]
    alone = len(halves) - 1 if len(halves) % 2 else len(halves)   # the one without a neighbour takes both columns
    sections = [wide(comparison(story)), *(half if place != alone else wide(half) for place, half in enumerate(halves)),
                wide(events(story)), wide(shown(story)), footer(story)]
    return f"{top(story)}\n{lines(sections)}"
