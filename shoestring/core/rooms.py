"""The rooms that are installed, by name: training, and whatever else packages bring. No room is named here.

A package declares a room by an entry point of the group `shoestring.rooms`, whose value is a `RoomPlugin`; ours are declared the same way, in
pyproject.toml. In a source tree that nobody installed, that file is read itself.

    [project.entry-points."shoestring.rooms"]
    shorten = "texts.plugin:SHORTEN"

A name that stands in a file or a message is only ever looked up among these: nothing is imported because a file says so.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from shoestring.core.errors import Mistake
from shoestring.core.suggest import did_you_mean

if TYPE_CHECKING:
    from shoestring.processes.task import Task

GROUP = "shoestring.rooms"
PACKAGE = Path(__file__).resolve().parents[1]


class RoomPlugin:
    """What a room brings to the code that all rooms share. Everything but its name has a default.

    Importing the module that has it must be cheap (no torch): methods import what they need.
    """

    name: ClassVar[str]  # in requests, tasks and its entry point

    preloaded: ClassVar[tuple[str, ...]] = ()  # modules that its workers need: imported once, before they are forked

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
