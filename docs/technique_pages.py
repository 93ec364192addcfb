"""Writes a page for every technique of every catalogue, from its docstrings, its fields and its room's table of conflicts.

python docs/technique_pages.py FOLDER        docs/mkdocs_hooks.py calls `technique_pages` for the documentation site
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from io import StringIO
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

from docstring_markdown import markdown

from shoestring.compression.catalogue import CATALOGUE as COMPRESSION
from shoestring.compression.catalogue import CLASHES
from shoestring.core.exactness import Exactness
from shoestring.core.technique import Technique
from shoestring.federated.catalogue import CATALOGUE as FEDERATED
from shoestring.federated.catalogue import CONFLICTS as FEDERATED_CONFLICTS
from shoestring.federated.catalogue import SLOTS
from shoestring.serving.catalogue import CATALOGUE as SERVING
from shoestring.serving.catalogue import CONFLICTS as SERVING_CONFLICTS
from shoestring.training.catalogue import CATALOGUE as TRAINING
from shoestring.training.conflicts import CONFLICTS as TRAINING_CONFLICTS
from shoestring.training.group_technique import UNITING, GroupTechnique

Kind = type[Technique[Any, Any]]
Conflicts = Mapping[frozenset[str], str]
ROOT = Path(__file__).parents[1]


class RoomPages(NamedTuple):
    name: str
    command: str  # that takes --use
    catalogue: tuple[Kind, ...]
    conflicts: Conflicts
    compared: str  # what the level of equivalence is compared with


ROOMS = (
    RoomPages("training", "shoestring train my.py", TRAINING, TRAINING_CONFLICTS, "plain training"),
    RoomPages("federated", "shoestring federate my.py", FEDERATED, FEDERATED_CONFLICTS, "plain federated averaging"),
    RoomPages(
        "compression",
        "shoestring compress runs/a --job my.py",
        COMPRESSION,
        {frozenset(kind.__name__ for kind in pair): why for pair, why in CLASHES.items()},
        "the model that is compressed",
    ),
    RoomPages("serving", "shoestring serve my.py", SERVING, SERVING_CONFLICTS, "the model on one sample alone"),
)


def technique_pages() -> dict[str, str]:
    """The text of every page, by its path below the folder of technique pages."""
    return {f"{room.name}/{kind.__name__}.md": page(kind, room) for room in ROOMS for kind in room.catalogue}


def page(kind: Kind, room: RoomPages) -> str:
    """The page of one technique, in Markdown."""
    about, costs, avoid = parts_of_docstring(kind)
    module = inspect.getmodule(kind)
    assert module is not None and module.__doc__, f"{kind.__name__} stands in a module with a docstring"
    summary, formula = sorted(
        (about, markdown(inspect.cleandoc(module.__doc__))), key=len
    )  # the formula stands in the longer of the two
    clashes = "\n".join(f"- {line}" for line in conflicts_of(kind, room))
    sections = {
        "": f'{summary}\n\n*{kind.why[0].upper()}{kind.why[1:]}.*\n\n    {room.command} --use "{usage(kind)}"',
        "Formula and source": formula,
        "Knobs": knob_table(kind),
        "How close the result stays": equivalence(kind, room.compared),
        "What it costs": costs,
        "When not to use it": avoid + (f"\n\nIt can't be combined with:\n\n{clashes}" if clashes else ""),
        "In the source": f"`{Path(inspect.getfile(kind)).relative_to(ROOT)}`",
    }
    body = "\n\n".join(f"## {title}\n\n{text}" if title else text for title, text in sections.items())
    return f"# {kind.__name__}\n\n{body}\n"


def parts_of_docstring(kind: Kind) -> tuple[str, str, str]:
    """What the class's own docstring says: of the technique, after `Costs:` and after `Not for:`."""
    text = inspect.cleandoc(kind.__dict__["__doc__"] or "")
    found = re.fullmatch(r"(.+?)\n\nCosts: (.+?)\n\nNot for: (.+)", text, flags=re.DOTALL)
    if found is None:
        raise ValueError(
            f"the docstring of {kind.__name__} ends without the paragraphs `Costs: ...` and `Not for: ...`"
        )
    about, costs, avoid = found.groups()
    return markdown(about), costs[0].upper() + costs[1:], avoid[0].upper() + avoid[1:]


def usage(kind: Kind) -> str:
    """How --use writes it: with a value for every knob that has no default."""
    required = [one.name for one in fields(kind) if one.default is MISSING]  # type: ignore[arg-type]
    return f"{kind.__name__}({', '.join(f'{name}=...' for name in required)})"


def knob_table(kind: Kind) -> str:
    """The fields of a technique with their types, defaults and the comments beside them."""
    comments = {name: text for base in reversed(kind.__mro__[:-1]) for name, text in field_comments(base)}
    rows = [
        f"| `{one.name}` | `{one.type}` | {'required' if one.default is MISSING else f'`{one.default!r}`'} "
        f"| {comments.get(one.name, '').replace('|', '&#124;')} |"
        for one in fields(kind)  # type: ignore[arg-type]
    ]
    return "\n".join(["| knob | type | default | meaning |", "|---|---|---|---|", *rows]) if rows else "None."


def field_comments(base: type) -> Iterator[tuple[str, str]]:
    """The comments on the lines of a class's fields."""
    try:
        source = dedent(inspect.getsource(base))
    except (OSError, TypeError):
        return
    comments: dict[int, list[str]] = {}
    for token in tokenize.generate_tokens(StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.setdefault(token.start[0], []).append(token.string.lstrip("# "))
    (tree,) = ast.parse(source).body
    for node in getattr(tree, "body", ()):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            yield node.target.id, " ".join(text for line in lines for text in comments.get(line, ()))


def equivalence(kind: Kind, compared: str) -> str:
    """The levels that a technique may state, the closest first."""
    levels = sorted(stated_levels(kind))
    lines = "\n".join(f"- **{level.word}**: {level.meaning.replace('plain training', compared)}" for level in levels)
    several = "One of these, by the job and the knobs; the plan says which" if len(levels) > 1 else "The level"
    return f"{several}, compared with {compared}:\n\n{lines}"


def stated_levels(kind: Kind) -> set[Exactness]:
    """The levels that `exactness` names: in its source, or in that of a function that it calls."""
    usual = {Exactness.BITS if kind.exact else Exactness.CHANGED}
    if kind.exactness is Technique.exactness:
        return usual
    method = inspect.unwrap(kind.exactness)
    known = vars(inspect.getmodule(method))
    called = [known[name] for name in method.__code__.co_names if inspect.isfunction(known.get(name))]
    source = "".join(inspect.getsource(one) for one in (method, *called))
    named = {Exactness[name] for name in re.findall(r"Exactness\.([A-Z]+)", source)}
    return named | (usual if "super()" in source or not named else set())


def conflicts_of(kind: Kind, room: RoomPages) -> Iterable[str]:
    """What it can't be combined with and why, a line each."""
    slot = getattr(kind, "slot", "")
    rivals = [one.__name__ for one in room.catalogue if slot and getattr(one, "slot", "") == slot and one is not kind]
    if rivals:
        yield f"{', '.join(f'`{name}`' for name in rivals)}: they also say {SLOTS.get(slot, slot)}"
    others: dict[str, list[str]] = {}
    for pair, why in room.conflicts.items():
        for name in (one for one in pair if stands_for(one, kind)):
            other = next(iter(pair - {name}), name)
            with_knobs = f" (with `{name}`)" if name.startswith(f"{kind.__name__}(") else ""
            others.setdefault(why, []).append(f"`{other}`{with_knobs}")
    yield from (f"{', '.join(names)}: {why}" for why, names in others.items())


def stands_for(name: str, kind: Kind) -> bool:
    """Whether a name in a table of conflicts means a technique, one of its settings, or all that unite workers as it does."""
    united = issubclass(kind, GroupTechnique) and name in (UNITING, f"{UNITING} along {kind.unites}")
    return name.partition("(")[0] == kind.__name__ or united


def write(folder: Path) -> None:
    """Write all pages below a folder."""
    for path, text in technique_pages().items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
