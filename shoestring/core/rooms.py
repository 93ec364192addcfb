"""The installed rooms, by name. This file names none of them: ours are found as any other package's are.

A package declares a room by an entry point of the group `shoestring.rooms`, whose value is a `RoomPlugin`; ours are
declared in pyproject.toml. In a source tree that is not installed, that file is read instead.

    [project.entry-points."shoestring.rooms"]
    shorten = "texts.plugin:SHORTEN"

A room's name in a file or a message is only looked up among these: nothing is imported because a file says so.
"""

from __future__ import annotations

import os
import sys
from collections import namedtuple
from contextlib import suppress
from functools import cache

from shoestring.core.command_line.command import named_object
from shoestring.core.command_line.suggest import did_you_mean
from shoestring.core.errors import Mistake

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path
    from typing import Any, ClassVar

    from shoestring.core.command_line.command import Command, ExportFormat
    from shoestring.core.figures import Quantity
    from shoestring.processes.task import Task
    from shoestring.runs.events.event import Event
    from shoestring.runs.events.history import History
    from shoestring.runs.folder import Folder
    from shoestring.runs.request import Request
    from shoestring.show.page.room_page import RoomPage

GROUP = "shoestring.rooms"
PACKAGE = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
OWN = os.path.basename(PACKAGE)

Verb = namedtuple("Verb", ["base", "going", "done"])  # train, training, trained
Entry = namedtuple("Entry", ["name", "value"])  # value: "module:name" of its RoomPlugin


class RoomPlugin:
    """What a room brings to the code that all rooms share. Everything but its name has a default.

    Importing the module that has it must be cheap (no torch): methods import what they need.
    """

    name: ClassVar[str]  # as in requests, tasks and its entry point

    verb: ClassVar[Verb] = Verb("run", "running", "ran")  # what its runs do,
    counts: ClassVar[str] = "step"  # and what their steps are called
    place: ClassVar[int] = 100  # of its commands in the help, the smallest first
    preloaded: ClassVar[tuple[str, ...]] = ()  # modules that its workers need: imported once, before they are forked

    def commands(self) -> tuple[Command, ...]:
        """The commands that it adds."""
        return ()

    def exports(self) -> tuple[ExportFormat, ...]:
        """Formats that it writes weights of a run in, of whatever room."""
        return ()

    def cautions(self, request: Request) -> tuple[str, ...]:
        """What is to be said wherever weights or figures of such a run go."""
        return ()

    def events(self) -> tuple[type[Event], ...]:
        """The kinds of events that only its runs have."""
        return ()

    def quantities(self) -> tuple[Quantity, ...]:
        """The figures that its plans predict and its runs measure; empty: those of planning/quantities.py."""
        return ()

    def part(self, request: Request, history: History, folder: Folder) -> object:
        """Its own part of a run's report: a frozen dataclass, given to its page and written to JSON under the room's
        name; None: it has none."""
        return None

    def page(self) -> RoomPage[Any] | None:
        """Its own sections of a run's page; None: it has none."""
        return None

    @property
    def catalogue(self) -> Path:
        """The source file of its catalogue, from which names of techniques are read without importing them; it need not
        exist."""
        from pathlib import Path

        return Path(str(sys.modules[type(self).__module__].__file__)).with_name("catalogue.py")

    @property
    def import_root(self) -> Path:
        """The folder from which its package is imported."""
        return self.catalogue.parents[type(self).__module__.count(".")]

    def tasks(self) -> Mapping[str, type[Task[Any]]]:
        """The tasks of its worker processes, by kind."""
        return {}


def room_named(name: str) -> RoomPlugin:
    """The room with this name. Raises Mistake if no installed package declares it."""
    found = room_entries().get(name)
    if found is None:
        raise Mistake(
            f"no room {name!r} is installed{did_you_mean(name, room_entries())}; there are {', '.join(room_entries())}: "
            f"install the package that brings it"
        )
    return load_room(found)


@cache
def installed_rooms() -> tuple[RoomPlugin, ...]:
    """All rooms, without those that fail to import; `room_named` gives the reason for such a one."""
    found = []
    for entry in room_entries().values():
        with suppress(Mistake):
            found.append(load_room(entry))
    return tuple(found)


@cache
def own_rooms() -> tuple[RoomPlugin, ...]:
    """The rooms of this package in the order of the help, without a look at others."""
    return tuple(sorted((load_room(entry) for entry in own_entries()), key=lambda room: room.place))


@cache
def load_room(entry: Entry) -> RoomPlugin:
    """The room that an entry point declares. Raises Mistake if it is not a room."""
    try:
        found: object = named_object(entry.value)
    except Exception as error:
        raise Mistake(
            f"the room {entry.name} ({entry.value}) can't be imported: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(found, RoomPlugin) or found.name != entry.name:
        raise Mistake(f"the entry point {entry.name} of {GROUP} ({entry.value}) is no room of that name")
    return found


@cache
def room_entries() -> Mapping[str, Entry]:
    """The entry points of all rooms by name. Ours come first, so no other package can replace them."""
    found: dict[str, Entry] = {}
    for entry in (*own_entries(), *(one for place in packages() for one in entries_in(place, f"[{GROUP}]"))):
        found.setdefault(entry.name, entry)
    return found


@cache
def own_entries() -> tuple[Entry, ...]:
    """The rooms of this package: from a source tree's pyproject.toml, or from the installed entry points."""
    project = os.path.join(os.path.dirname(PACKAGE), "pyproject.toml")
    found = tuple(entries_in(project, f'[project.entry-points."{GROUP}"]'))
    if found and f'name = "{OWN}"' in text_of(project):
        return found
    return tuple(one for place in packages(f"{OWN}-") for one in entries_in(place, f"[{GROUP}]"))


def packages(begin: str = "") -> Iterator[str]:
    """The entry-point files of installed packages whose name begins with `begin`. They are found without
    importlib.metadata, whose import alone takes longer than our whole help."""
    for folder in dict.fromkeys(sys.path):
        with suppress(OSError):
            for name in sorted(os.listdir(folder or ".")):
                if name.startswith(begin) and name.endswith((".dist-info", ".egg-info")):
                    yield os.path.join(folder, name, "entry_points.txt")


def entries_in(file: str, section: str) -> Iterator[Entry]:
    for line in text_of(file).partition(f"{section}\n")[2].partition("\n[")[0].splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.lstrip().startswith("#"):
            yield Entry(name.strip(), value.strip().strip('"'))


def text_of(file: str) -> str:
    try:
        with open(file, encoding="utf-8") as opened:
            return opened.read()
    except (OSError, ValueError):
        return ""
