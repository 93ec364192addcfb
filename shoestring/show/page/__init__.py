"""The page of a run: one file that loads nothing else. Charts are SVG pictures, which a script in the page makes
interactive.

    runs.report.Report  ->  sections, empty ones are left out
        ->  content, the inside of <main>: sent again and again while a run is watched
        ->  page, one HTML document: the report

A section is a function from the report to markup; empty if it does not apply. Other packages add sections by an entry
point of the group "shoestring.sections"; text that is not markup is escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

from markupsafe import Markup

from shoestring.planning.spelling import defaults
from shoestring.runs.reports.report import Report
from shoestring.show.page.document import document
from shoestring.show.page.drawings.curves import losses, metrics, norms, process, rates, throughput, validations
from shoestring.show.page.render import compile_all, escape_cut, render
from shoestring.show.page.room_page import ask_room, page_of, pages
from shoestring.show.page.sections.cut import stages
from shoestring.show.page.sections.figures import blocks, comparison, parts
from shoestring.show.page.sections.telling import checkpoints, events, footer, plan, runners_up, shown_text
from shoestring.show.page.sections.top import title, top
from shoestring.show.page.style import STYLE

Section = Callable[[Report], str]
GROUP = "shoestring.sections"
SECTIONS: tuple[Section, ...] = (
    validations,
    rates,
    norms,
    throughput,
    process,
    blocks,
    parts,
    plan,
    runners_up,
    checkpoints,
)


def page(report: Report, more: Iterable[Section] = ()) -> str:
    """The whole document; `more`: additional sections.

    >>> page(Report()).splitlines()[0]
    '<!doctype html>'
    """
    return document(title(report), content(report, more), style=STYLE + page_of(report).style)


def content(report: Report, more: Iterable[Section] = ()) -> Markup:
    """What stands inside <main>."""
    for own in ask_room(report, Markup, lambda room: [room.whole(report.of_room)]):
        return own
    rest = (section(report) for section in (*SECTIONS, *from_packages(), *more))
    first: list[str] = [body for body in (losses(report), *metrics(report)) if body]
    if len(first) % 2:
        first[0] = wide(first[0])
    elif first:
        first[:2] = with_class(first[0], "lead"), with_class(first[1], "beside")
    sections = [
        *first,
        *of_room(report),
        wide(comparison(report)),
        wide(stages(report)),
        *in_two_columns(rest),
        wide(events(report)),
        wide(shown_text(report)),
        footer(report),
    ]
    return render("content.html", top=top(report), sections=sections)


def of_room(report: Report) -> list[str]:
    """The sections of the run's room."""
    room, found = page_of(report), []
    try:
        for body in room.sections(report.of_room, report):
            if not isinstance(body, str):
                raise TypeError(f"it gave a {type(body).__name__}, not text")
            found.append(body)
    except (Exception, SystemExit) as error:
        return [failed_section(type(room).__name__, failure_text(error))]
    return [body for body in found if body]


def in_two_columns(sections: Iterable[str]) -> list[str]:
    """Sections in two columns; one without a neighbour takes both."""
    found = [body for body in sections if body]
    return found[:-1] + [wide(found[-1])] if len(found) % 2 else found


def prepare() -> None:
    """Do the one-time work of the first page (a tenth of a second), so that the cost of drawing can be measured."""
    compile_all(room.templates for room in pages().values() if room.templates)
    defaults()
    from_packages()


def wide(section: str) -> str:
    return with_class(section, "wide")


def with_class(section: str, name: str) -> str:
    return section.replace(Markup("<section>"), Markup(f'<section class="{name}">'), 1)


@cache
def from_packages() -> tuple[Section, ...]:
    """The sections of other packages; one that fails to import says so on the page."""
    from importlib.metadata import entry_points

    return tuple(guarded_section(entry.value, entry.load) for entry in entry_points(group=GROUP))


def guarded_section(name: str, load: Callable[[], Section]) -> Section:
    """A section of another package; if it fails, its place shows the error."""

    def section(report: Report) -> str:
        try:
            found: object = load()(report)
            if isinstance(found, str):
                return found
            why = f"it gave a {type(found).__name__}, not text"
        except (Exception, SystemExit) as error:
            why = failure_text(error)
        return failed_section(name, why)

    return section


def failed_section(name: str, why: str) -> Markup:
    return Markup("<section>\n<p>{}</p>\n</section>").format(escape_cut(f"{name} can't be shown: {why}"))


def failure_text(error: BaseException) -> str:
    """The message of an error, unless asking for it fails as well."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__
