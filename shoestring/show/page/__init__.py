"""The page of a run: no other file, nothing fetched, and as the report at the end no script.

    report (by the keys of runs.report, any key may be missing)  ->  sections, each empty if its figures are
        ->  content, what stands inside <main>: sent again and again while a run is watched
        ->  page, one HTML document: the report

A section is a function from the report, by its keys, to markup, empty where it has nothing to say. Other packages add theirs by an entry
point of the group "shoestring.sections"; text that is not markup is escaped.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

from markupsafe import Markup

from shoestring.planning.spelling import defaults
from shoestring.show.page.document import document
from shoestring.show.page.figures import blocks, comparison, losses, parts, process, throughput
from shoestring.show.page.render import compile_all, render, said
from shoestring.show.page.stale import staleness
from shoestring.show.page.telling import checkpoints, events, footer, plan, runners_up, shown
from shoestring.show.page.top import title, top
from shoestring.show.page.words import Entries, Report, as_mapping

Section = Callable[[Entries], str]
GROUP = "shoestring.sections"
SECTIONS: tuple[Section, ...] = (losses, throughput, process, blocks, parts, staleness, plan, runners_up, checkpoints)


def page(report: Entries | Report, more: Iterable[Section] = ()) -> str:
    """The whole document, with `more` sections beside ours.

    >>> page({"job": "gpt"}).splitlines()[0]
    '<!doctype html>'
    """
    entries = as_mapping(report)
    return document(title(entries), content(entries, more))


def content(report: Entries | Report, more: Iterable[Section] = ()) -> Markup:
    """What stands inside <main>."""
    entries = as_mapping(report)
    halves = [body for body in (section(entries) for section in (*SECTIONS, *from_packages(), *more)) if body]
    alone = len(halves) - 1 if len(halves) % 2 else len(halves)   # the one without a neighbour takes both columns
    sections = [wide(comparison(entries)), *(half if place != alone else wide(half) for place, half in enumerate(halves)),
                wide(events(entries)), wide(shown(entries)), footer(entries)]
    return render("content.html", top=top(entries), sections=sections)


def prepare() -> None:
    """Do what the first page would do once and for all (a tenth of a second): who draws often knows then what drawing costs."""
    compile_all()
    defaults()
    from_packages()


def wide(section: str) -> str:
    return section.replace(Markup("<section>"), Markup('<section class="wide">'), 1)


@cache
def from_packages() -> tuple[Section, ...]:
    """The sections of other packages; one that can't be imported says so on the page."""
    from importlib.metadata import entry_points

    return tuple(guarded(entry.value, entry.load) for entry in entry_points(group=GROUP))


def guarded(name: str, load: Callable[[], Section]) -> Section:
    """A section of somebody else, which tells of its failure instead of taking the page down."""
    def drawn(entries: Entries) -> str:
        try:
            return load()(entries)
        except Exception as error:
            return Markup("<section>\n<p>{}</p>\n</section>").format(said(f"{name} can't be shown: {type(error).__name__}: {error}"))

    return drawn
