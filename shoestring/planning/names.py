"""Names and knobs of the catalogue's techniques, read off their source: importing them would import torch, a hundred times as slow."""

from __future__ import annotations

import ast
from pathlib import Path

from shoestring.core.rooms import RoomPlugin, room_named
from shoestring.core.technique_syntax import call_of, check_knobs, check_name


def check_written(written: str, room: str) -> None:
    """Refuse a technique that no one could make: not a call, a name or a knob that is not in the room's catalogue."""
    name, knobs = call_of(written)
    files = technique_files(room_named(room))
    check_name(name, files)
    if knobs:
        check_knobs(name, knobs, knobs_of(name, files[name]))


def technique_files(room: RoomPlugin) -> dict[str, Path]:
    """The techniques that a room's catalogue lists, by name, with the files that they are in; none if it is not written like ours."""
    if not room.catalogue.is_file():
        return {}
    tree = source(room.catalogue)
    homes = {
        one.name: room.import_root.joinpath(*node.module.split(".")).with_suffix(".py")
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module
        for one in node.names
    }
    listed = (
        node.value for node in tree.body if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "CATALOGUE"
    )
    names = next((list(map(ast.unparse, one.elts)) for one in listed if isinstance(one, ast.Tuple)), [])
    return {name: homes[name] for name in names if name in homes}


def knobs_of(name: str, file: Path) -> list[str]:
    """The fields of a technique's class."""
    kind = next(node for node in source(file).body if isinstance(node, ast.ClassDef) and node.name == name)
    return [
        ast.unparse(node.target)
        for node in kind.body
        if isinstance(node, ast.AnnAssign) and not ast.unparse(node.annotation).startswith("ClassVar")
    ]


def source(file: Path) -> ast.Module:
    return ast.parse(file.read_bytes(), str(file))
