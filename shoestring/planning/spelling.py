"""Write the techniques in a plan's JSON as `core.technique.text` writes them, without importing them (and torch).

Knobs at their default are left out; defaults are read from the source, like names and knobs (`planning.names`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from shoestring.core.rooms import installed_rooms
from shoestring.planning.names import knobs_of, source, technique_files


def technique_text(one: Mapping[str, Any]) -> str:
    """
    >>> technique_text({"name": "Checkpoint", "knobs": {"every": 2, "groups": 0}}), technique_text({"name": "FusedOptimizer", "knobs": {}})
    ('Checkpoint(every=2)', 'FusedOptimizer()')
    >>> technique_text({"name": "Unheard", "knobs": {"of": None}})
    'Unheard(of=None)'
    >>> technique_text({"name": "Quantize", "knobs": {"bits": 4, "group": 0}})   # two catalogues have one: its knobs tell which it is
    'Quantize(bits=4)'
    """
    name, knobs = str(one.get("name") or "technique"), one.get("knobs")
    given = knobs if isinstance(knobs, Mapping) else {}
    usual = next((found for knobs, found in defaults().get(name, ()) if set(given) <= knobs), {})
    shown = {knob: value for knob, value in given.items() if knob not in usual or value != usual[knob]}
    return f"{name}({', '.join(f'{knob}={value!r}' for knob, value in shown.items())})"


def plan_text(techniques: Iterable[Mapping[str, Any]]) -> str:
    """The techniques of a plan in one line, as `str(plan)` writes them."""
    return " + ".join(map(technique_text, techniques)) or "plain"


@cache
def defaults() -> dict[str, list[tuple[frozenset[str], dict[str, Any]]]]:
    """For each technique name, in the catalogues of all rooms: its knobs, and the defaults of those that have one."""
    found: dict[str, list[tuple[frozenset[str], dict[str, Any]]]] = {}
    for room in installed_rooms():
        for name, file in technique_files(str(room.catalogue), str(room.import_root)).items():
            found.setdefault(name, []).append((frozenset(knobs_of(name, file)), dict(defaults_in(name, file))))
    return found


def defaults_in(name: str, file: str) -> Iterable[tuple[str, Any]]:
    kind = next(node for node in source(file).body if isinstance(node, ast.ClassDef) and node.name == name)
    for node in kind.body:
        if (
            isinstance(node, ast.AnnAssign)
            and node.value is not None
            and not ast.unparse(node.annotation).startswith("ClassVar")
        ):
            try:
                yield ast.unparse(node.target), ast.literal_eval(node.value)
            except ValueError:  # a computed default: always shown
                continue
