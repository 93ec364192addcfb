"""The rooms that are installed, by name, ours like anybody's: none is named here.

A package declares a room by an entry point of the group `shoestring.rooms`, whose value is a `RoomPlugin`; ours are
declared in pyproject.toml. In a source tree that nobody installed, that file is read itself.

    [project.entry-points."shoestring.rooms"]
    shorten = "texts.plugin:SHORTEN"

A name in a file or a message is only ever looked up among these: nothing is imported because a file says so.
"""

from __future__ import annotations

import os
import sys
from collections import namedtuple
from contextlib import suppress
from functools import cache

from shoestring.core.command import named_object
from shoestring.core.errors import Mistake
from shoestring.core.suggest import did_you_mean

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path
    from typing import Any, ClassVar

    from shoestring.core.command import Command, ExportFormat
    from shoestring.core.figures import Quantity
    from shoestring.processes.task import Task
    from shoestring.runs.event import Event
    from shoestring.runs.folder import Folder
    from shoestring.runs.history import History
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

    name: ClassVar[str]  # in requests, tasks and its entry point

    verb: ClassVar[Verb] = Verb("run", "running", "ran")  # what its runs do,
    counts: ClassVar[str] = "step"  # and what their steps are called
    place: ClassVar[int] = 100  # of its commands in the help, the smallest first
    preloaded: ClassVar[tuple[str, ...]] = ()  # modules that its workers need: imported once, before they are forked

    def commands(self) -> tuple[Command, ...]:
        """What it adds to the command line."""
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
        from pathlib import Path

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
def own_rooms() -> tuple[RoomPlugin, ...]:
    """The rooms of this package in the order of the help, without a look at others."""
    return tuple(sorted((loaded(entry) for entry in own_entries()), key=lambda room: room.place))


@cache
def loaded(entry: Entry) -> RoomPlugin:
    """What an entry point declares. Raises Mistake where that is no room."""
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
def declared() -> Mapping[str, Entry]:
    """The entry points of all rooms by name; ours first, which no other package can replace."""
    found: dict[str, Entry] = {}
    for entry in (*own_entries(), *(one for place in packages() for one in entries_in(place, f"[{GROUP}]"))):
        found.setdefault(entry.name, entry)
    return found


@cache
def own_entries() -> tuple[Entry, ...]:
    """The rooms of this package: as a source tree's pyproject.toml declares them, or as it was installed."""
    project = os.path.join(os.path.dirname(PACKAGE), "pyproject.toml")
    found = tuple(entries_in(project, f'[project.entry-points."{GROUP}"]'))
    if found and f'name = "{OWN}"' in text_of(project):
        return found
    return tuple(one for place in packages(f"{OWN}-") for one in entries_in(place, f"[{GROUP}]"))


def packages(begin: str = "") -> Iterator[str]:
    """Where packages that are installed tell of their entry points, of those whose name begins so. Read off what pip wrote:
    importlib.metadata takes longer to import than all of our help takes."""
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
