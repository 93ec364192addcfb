"""Everything in a catalogue is reached by --use, has a row in its room's page, and says in figures or formulas what it
does."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from shoestring.compression.catalogue import CATALOGUE as COMPRESSION
from shoestring.core.command_line.technique_syntax import RENAMED
from shoestring.core.errors import Mistake
from shoestring.core.technique import parse_technique, text
from shoestring.federated.catalogue import CATALOGUE as FEDERATED
from shoestring.planning import names
from shoestring.serving.catalogue import CATALOGUE as SERVING
from shoestring.training.catalogue import CATALOGUE as TRAINING

DOCS = Path(__file__).parents[1] / "docs"
ROOMS: tuple[tuple[tuple[type[Any], ...], str, str], ...] = (
    (TRAINING, "shoestring.training", "techniques.md"),
    (FEDERATED, "shoestring.federated", "federated.md"),
    (COMPRESSION, "shoestring.compression", "compress.md"),
    (SERVING, "shoestring.serving", "serve.md"),
)
# Knobs without a default, or of which the default alone does nothing
NEEDED: dict[str, dict[str, Any]] = {
    "Accumulate": {"pieces": 2},
    "Prune": {"heads": 0.5},
    "Krum": {"malicious": 1},
    "MultiKrum": {"malicious": 1},
    "NormBound": {"norm": 1.0},
}
SOURCE = re.compile(r"arXiv [\d.]+|doi \S+|\b(19|20)\d\d\b")  # numbers that say nothing
FORMULA = re.compile(r"^ {4,}\S.*(=|<-|->|\+|/|\^|\|)", re.MULTILINE)
FIGURE = re.compile(
    r"(?<![\w.])\.?\d+(\.\d+)?( ?%| (times|bits?|bytes?|points|shares|steps))|(?<![\w.])0?\.\d+|\d\^-?\d"
)
ALL = [pytest.param(kind, room, id=kind.__name__) for room in ROOMS for kind in room[0]]


@pytest.mark.parametrize(("kind", "room"), ALL)
def test_a_technique_is_written_as_it_is_told(kind: type[Any], room: tuple[Any, str, str]) -> None:
    catalogue, file, _ = room
    one = kind(**NEEDED.get(kind.__name__, {}))
    names.check_written(text(one), file)
    assert parse_technique(text(one), catalogue) == one


@pytest.mark.parametrize(("kind", "room"), ALL)
def test_a_technique_has_a_row_in_its_rooms_page(kind: type[Any], room: tuple[Any, str, str]) -> None:
    rows = [line.split("|")[1] for line in (DOCS / room[2]).read_text().splitlines() if line.startswith("| `")]
    assert any(re.search(rf"`{kind.__name__}\b", row) for row in rows), f"docs/{room[2]}"


@pytest.mark.parametrize(("kind", "room"), ALL)
def test_a_technique_says_in_a_formula_or_a_figure_what_it_does(kind: type[Any], room: tuple[Any, str, str]) -> None:
    told = f"{sys.modules[kind.__module__].__doc__}\n{vars(kind).get('__doc__') or ''}"
    said = SOURCE.sub("", told)
    assert FORMULA.search(said) or FIGURE.search(said), told


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_old_name_is_answered_with_the_new_one(old: str, new: str) -> None:
    (room,) = (one for one in ROOMS if new in {kind.__name__ for kind in one[0]})
    for check in (lambda: names.check_written(f"{old}()", room[1]), lambda: parse_technique(f"{old}()", room[0])):
        with pytest.raises(Mistake, match=f"^{old} is called {new} now: write that instead$"):
            check()


def test_a_new_name_is_not_that_of_an_old_one_in_its_room() -> None:
    for catalogue, _, _ in ROOMS:
        here = {kind.__name__ for kind in catalogue}
        assert not any(old in here and new in here for old, new in RENAMED.items())
