"""Names and knobs of the catalogue's techniques, read off their source: importing them would import torch, a hundred times as slow."""

from __future__ import annotations

import ast
import os

from shoestring.core.technique_syntax import call_of, check_knobs, check_name

ROOT = os.path.dirname(os.path.dirname(__file__))
TRAINING, FEDERATED, COMPRESS = (
    os.path.join(room, "catalogue.py") for room in ("training", "federated", "compression")
)

FEDERATED_GROUP = "shoestring.federated"  # of entry points, by which packages bring techniques of a federated round


def check_written(written: str, catalogue: str = TRAINING) -> None:
    """Refuse a technique that no one could make: not a call, a name or a knob that is not there."""
    name, knobs = call_of(written)
    files = technique_files(catalogue)
    check_name(name, files)
    if knobs:
        check_knobs(name, knobs, knobs_of(name, files[name]))


def technique_files(catalogue: str = TRAINING) -> dict[str, str]:
    """The techniques that a catalogue lists, by name, with the files that they are in."""
    tree = source(os.path.join(ROOT, catalogue))
    homes = {
        one.name: node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module
        for one in node.names
    }
    listed = next(
        node.value for node in tree.body if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "CATALOGUE"
    )
    assert isinstance(listed, ast.Tuple), "the catalogue is a tuple of names"
    return {(name := ast.unparse(one)): os.path.join(ROOT, *homes[name].split(".")[1:]) + ".py" for one in listed.elts}


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
