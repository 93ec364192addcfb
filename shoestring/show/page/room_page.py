"""A room's own parts of a run's page and of the overview."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from shoestring.core.rooms import RoomPlugin, installed_rooms
from shoestring.planning.quantities import MEASURABLE
from shoestring.show.page.render import NONE

if TYPE_CHECKING:
    from markupsafe import Markup

    from shoestring.runs.reports.report import Report
    from shoestring.show.page.drawings.charts import Line
    from shoestring.show.page.sections.tiles import Tile


P = TypeVar("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Cell:
    """A figure as text, and as a number to sort by."""

    text: str = NONE
    value: float | str = ""
    over: bool = False


@dataclass(frozen=True)
class RoomCell:
    """A figure of one run in a column that the room adds to the overview."""

    column: str
    cell: Cell
    first: str = "up"  # sort order on the first click


class RoomPage(Generic[P]):
    """Base class of a room's parts; the defaults add nothing. `own` is the value of `RoomPlugin.part`."""

    note: ClassVar[str] = (  # below the table of predicted and measured figures
        "The difference is measured minus predicted; plain is what is needed without any technique."
    )
    plain: ClassVar[str] = "Without techniques"  # what a run without any technique is called
    at_the_end: ClassVar[tuple[str, ...]] = ()  # its rows that are of the whole run: measured when it is over
    plans_memory: ClassVar[bool] = True  # its plans predict the memory of the process
    fewer_is_early: ClassVar[bool] = False  # a run that finished after fewer steps than it wanted ended early
    style: ClassVar[str] = ""  # CSS
    templates: ClassVar[str] = ""  # package of the templates that its sections use

    def __init__(self, room: RoomPlugin) -> None:
        self.counts, self.verb = room.counts, room.verb
        self.quantities = room.quantities() or MEASURABLE  # the rows of the table of predicted beside measured

    def flags(self, own: P) -> Mapping[str, object]:
        """Options besides the job's arguments, by name."""
        return {}

    def whole(self, own: P) -> Markup | None:
        """What stands inside <main>, where nothing of it is as other rooms have it; None: what is common, and its sections."""
        return None

    def sections(self, own: P, report: Report) -> Iterable[str]:
        """Sections as markup, shown below the first charts; empty ones are left out."""
        return ()

    def tiles(self, own: P) -> Iterable[Tile]:
        """Figures for the top of the page."""
        return ()

    def ending(self, own: P, why: str) -> str | None:
        """The end of the sentence about the run's result, such as "Trained 3 rounds"; `why`: the reason if it did not
        end by itself."""
        return None

    def cells(self, own: P) -> Iterable[RoomCell]:
        """Figures for the overview."""
        return ()

    def lines(self, own: P) -> Iterable[tuple[str, Line]]:
        """Lines by name, which the overview overlays with those of other runs."""
        return ()


PLAIN: RoomPage[Any] = RoomPage(RoomPlugin())


def page_of(report: Report) -> RoomPage[Any]:
    """The page parts of the run's room."""
    return pages().get(report.room, PLAIN)


def ask_room(report: Report, kind: type[T], ask: Callable[[RoomPage[Any]], Iterable[T | None]]) -> list[T]:
    """What the room says when asked, without None; empty if that fails or anything is of another kind, so that no room
    breaks a page."""
    try:
        found = [one for one in ask(page_of(report)) if one is not None]
    except (Exception, SystemExit):
        return []
    return [one for one in found if isinstance(one, kind)] if all(isinstance(one, kind) for one in found) else []


@cache
def pages() -> Mapping[str, RoomPage[Any]]:
    """The page parts of all rooms, by room; rooms that fail to import, or have parts of another kind, add nothing."""
    found: dict[str, RoomPage[Any]] = {}
    for room in installed_rooms():
        with suppress(Exception):
            page = room.page()
            if isinstance(page, RoomPage) and isinstance(page.style, str) and isinstance(page.templates, str):
                found[room.name] = page
            else:
                found[room.name] = RoomPage(room)
    return found


def style_of_rooms() -> str:
    """The CSS of all rooms, because the room of a live page's run is not known before it is read."""
    return "".join(page.style for page in pages().values())
