"""Names and knobs of the catalogue's techniques, read from their source: importing them would import torch, which takes
a hundred times as long."""

from __future__ import annotations

import ast
import os

from shoestring.core.command_line.technique_syntax import call_of, check_knobs, check_name

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))  # the folder from which this package is imported


def check_written(written: str, package: str) -> None:
    """Refuse a technique that can't exist: not a call, or a name or knob that is in no catalogue of ours."""
    name, knobs = call_of(written)
    files = technique_files(os.path.join(ROOT, *package.split("."), "catalogue.py"), ROOT)
    check_name(name, files)
    if knobs:
        check_knobs(name, knobs, knobs_of(name, files[name]))


def technique_files(catalogue: str, root: str) -> dict[str, str]:
    """The techniques that a catalogue lists, by name, with their source files; none if it is not written like ours.
    `root`: the folder from which its package is imported."""
    if not os.path.isfile(catalogue):
        return {}
    tree = source(catalogue)
    homes = {
        one.name: os.path.join(root, *node.module.split(".")) + ".py"
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module
        for one in node.names
    }
    listed = (
        node.value for node in tree.body if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "CATALOGUE"
    )
    names = next((list(map(ast.unparse, one.elts)) for one in listed if isinstance(one, ast.Tuple)), [])
    return {name: homes[name] for name in names if name in homes}


def knobs_of(name: str, file: str) -> list[str]:
    """The fields of a technique's class."""
    kind = next(node for node in source(file).body if isinstance(node, ast.ClassDef) and node.name == name)
    return [
        ast.unparse(node.target)
        for node in kind.body
        if isinstance(node, ast.AnnAssign) and not ast.unparse(node.annotation).startswith("ClassVar")
    ]


def source(file: str) -> ast.Module:
    with open(file, "rb") as text:
        return ast.parse(text.read(), file)
