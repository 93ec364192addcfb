"""The rooms that are installed, by name, ours like anybody's: none is named here.

A package declares a room by an entry point of the group `shoestring.rooms`, whose value is a `RoomPlugin`; ours are
declared in pyproject.toml. In a source tree that nobody installed, that file is read itself.

    [project.entry-points."shoestring.rooms"]
    shorten = "texts.plugin:SHORTEN"

A name in a file or a message is only ever looked up among these: nothing is imported because a file says so.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from shoestring.core.errors import Mistake
from shoestring.core.suggest import did_you_mean

if TYPE_CHECKING:
    from shoestring.core.figures import Quantity
    from shoestring.processes.task import Task
    from shoestring.runs.event import Event
    from shoestring.runs.folder import Folder
    from shoestring.runs.history import History
    from shoestring.runs.request import Request
    from shoestring.show.page.room_page import RoomPage

GROUP = "shoestring.rooms"
PACKAGE = Path(__file__).resolve().parents[1]


class RoomPlugin:
    """What a room brings to the code that all rooms share. Everything but its name has a default.

    Importing the module that has it must be cheap (no torch): methods import what they need.
    """

    name: ClassVar[str]  # in requests, tasks and its entry point

    counts: ClassVar[str] = "step"  # what the steps of its runs are called
    preloaded: ClassVar[tuple[str, ...]] = ()  # modules that its workers need: imported once, before they are forked

    def events(self) -> tuple[type[Event], ...]:
        """The kinds of events that only its runs have."""
        return ()

    def quantities(self) -> tuple[Quantity, ...]:
        """What its plans predict and its runs measure; none: what planning/quantities.py lists for all."""
        return ()

    def part(self, request: Request, history: History, folder: Folder) -> object:
        """What its runs have in their report beside what all runs have: a frozen dataclass, which its page is handed, and which the
        codec writes below the room's name; None: nothing."""
        return None

    def page(self) -> RoomPage[Any] | None:
        """What its runs have on their page beside what all runs have; None: nothing."""
        return None

    @property
    def catalogue(self) -> Path:
        """The source of its catalogue, from which techniques are spelled without importing them; it need not exist."""
        return Path(str(sys.modules[type(self).__module__].__file__)).with_name("catalogue.py")

    @property
    def import_root(self) -> Path:
        """The folder from which its package is imported."""
        return self.catalogue.parents[type(self).__module__.count(".")]

    def tasks(self) -> Mapping[str, type[Task[Any]]]:
        """What its worker processes can be asked to do, by the tasks' kinds."""
        return {}


def room_named(name: str) -> RoomPlugin:
    """The room of this name. Raises Mistake where no installed package has it."""
    found = declared().get(name)
    if found is None:
        raise Mistake(
            f"no room {name!r} is installed{did_you_mean(name, declared())}; there are {', '.join(declared())}: "
            f"install the package that brings it"
        )
    return loaded(found)


@cache
def installed_rooms() -> tuple[RoomPlugin, ...]:
    """All rooms. One that can't be imported is left out: who asks for it by name is told why."""
    found = []
    for entry in declared().values():
        with suppress(Mistake):
            found.append(loaded(entry))
    return tuple(found)


@cache
def loaded(entry: EntryPoint) -> RoomPlugin:
    """What an entry point declares. Raises Mistake where that is no room."""
    try:
        found: object = entry.load()
    except Exception as error:
        raise Mistake(
            f"the room {entry.name} ({entry.value}) can't be imported: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(found, RoomPlugin) or found.name != entry.name:
        raise Mistake(f"the entry point {entry.name} of {GROUP} ({entry.value}) is no room of that name")
    return found


@cache
def declared() -> Mapping[str, EntryPoint]:
    """The entry points of all rooms by name; ours first, which no other package can replace."""
    found: dict[str, EntryPoint] = {}
    for entry in (*in_source_tree(), *sorted(entry_points(group=GROUP), key=is_foreign)):
        found.setdefault(entry.name, entry)
    return found


def is_foreign(entry: EntryPoint) -> bool:
    return entry.dist is None or entry.dist.name != PACKAGE.name


def in_source_tree() -> Iterator[EntryPoint]:
    """The rooms that a source tree's pyproject.toml declares; none where this package is an installed one."""
    try:
        project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")).get("project", {})
    except (OSError, ValueError):
        return
    if project.get("name") == PACKAGE.name:
        for name, value in project.get("entry-points", {}).get(GROUP, {}).items():
            yield EntryPoint(name, value, GROUP)
