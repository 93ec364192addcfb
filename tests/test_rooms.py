"""The house: nothing outside a room names it, a class name means one thing, and what is private to a room stays there."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import shoestring
from shoestring.core import rooms
from shoestring.core.command_line.command import named_object
from shoestring.core.errors import Mistake
from shoestring.core.rooms import RoomPlugin, installed_rooms, room_entries, room_named

ROOT = Path(shoestring.__file__).parent
SHARED = ("core", "measure", "numerics", "planning", "runs", "processes", "web", "show", "commands", "jobfile.py")
# What tells a room: stems of its name in words and identifiers, and its package in imports and strings
NAMES = re.compile(
    r"federat\w*|compress\w*|distil\w*|\b(?:Train|Serv(?:e|ing))(?:Task|Result|Plan|Run|Command)\b|"
    r"shoestring[./](?:training|federated|compression|serving)",
    re.IGNORECASE,
)
CALLS = r"zlib\.\w+|\.decompress\("  # of the library of that name

# Where a shared file may name a room, as the lines that may, and why.
ALLOWED = {
    # One Job says what the user wants, for every room: the same file is trained, federated and compressed.
    "core/job.py": r"Where records lie on many devices",
    "core/clients/local.py": r"device does with its own records",
    "core/clients/clients.py": r"a federated job needs clients",
    "core/clients/statistics.py": r"running statistics of norm layers in a federation",
    # Optional packages are installed by hand: the hint says for which commands.
    "core/command_line/extras.py": r'Extra\("(?:private|onnx)"',
}


def sources(*folders: str) -> Iterator[tuple[str, str]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")) or [ROOT / folder]:
            if path.suffix in (".py", ".html", ".js"):
                yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def named_rooms(file: str, text: str) -> list[str]:
    """The lines of a file that name a room and may not."""
    allowed = re.compile(ALLOWED.get(file, r"$^"))
    return [
        f"{file}:{number}: {line.strip()}"
        for number, line in enumerate(text.splitlines(), 1)
        if NAMES.search(re.sub(CALLS, "", line)) and not allowed.search(line)
    ]


def test_nothing_outside_a_room_names_it() -> None:
    assert [line for file, text in sources(*SHARED) for line in named_rooms(file, text)] == []


def test_a_line_that_names_a_room_is_found_in_code_strings_and_comments() -> None:
    for line in (
        'if "federated" in story:',
        "from shoestring.training.planning.plan import Plan",
        "x = 1  # of compression",
    ):
        assert named_rooms("runs/reports/report.py", line), line
    assert not named_rooms("runs/reports/report.py", "packed = zlib.compress(text)")


def test_every_permission_is_needed() -> None:
    found = dict(sources(*SHARED))
    for file, line in ALLOWED.items():
        assert any(NAMES.search(one) and re.search(line, one) for one in found[file].splitlines()), file


@cache
def trees() -> dict[str, ast.Module]:
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in ROOT.rglob("*.py")
    }


def test_a_class_name_exists_once() -> None:
    names = Counter(node.name for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert {name: count for name, count in names.items() if count > 1} == {}


def test_what_is_private_to_a_module_is_imported_by_no_other() -> None:
    found = [
        f"{file}: {node.module}.{one.name}"
        for file, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shoestring")
        for one in node.names
        if one.name.startswith("_") and not one.name.startswith("__")
    ]
    assert found == []


def test_ours_are_declared_like_anybody_s() -> None:
    assert {one.name for one in installed_rooms()} >= {"training", "federated", "compression"}
    for name, entry in room_entries().items():
        assert room_named(name) is named_object(entry.value) and entry.name == name


def test_a_room_that_is_not_installed_is_told_and_nothing_is_imported_for_it() -> None:
    for name in ("trainin", "antigravity", "os:system"):
        with pytest.raises(Mistake, match=f"no room '{name}' is installed"):
            room_named(name)
    with pytest.raises(Mistake, match="did you mean training"):
        room_named("trainin")


def test_what_is_no_room_is_refused_when_it_is_asked_for_and_else_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Named(RoomPlugin):
        name = "another"

    monkeypatch.setattr(rooms, "KEPT", Named(), raising=False)
    wrong = {name: rooms.Entry(name, value) for name, value in WRONG.items()}
    monkeypatch.setattr(rooms, "room_entries", lambda: wrong)
    for name, why in (
        ("gone", "can't be imported"),
        ("text", "no room of that name"),
        ("other", "no room of that name"),
    ):
        with pytest.raises(Mistake, match=why):
            room_named(name)
    assert rooms.installed_rooms.__wrapped__() == ()


WRONG = {
    "gone": "shoestring.nowhere:ROOM",
    "text": "shoestring.core.rooms:GROUP",
    "other": "shoestring.core.rooms:KEPT",
}
