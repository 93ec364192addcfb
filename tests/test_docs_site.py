"""Every technique of every catalogue has a page on the documentation site, made from its docstrings alone."""

from __future__ import annotations

import doctest
import re
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from shoestring.training.memory.recompute.checkpoint import Checkpoint
from shoestring.training.technique import TrainingTechnique

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "docs"))

import docstring_markdown  # noqa: E402
import technique_pages  # noqa: E402
from technique_pages import ROOMS, conflicts_of, page, parts_of_docstring, stated_levels  # noqa: E402

KINDS = [(kind, room) for room in ROOMS for kind in room.catalogue]
SECTIONS = ("Formula and source", "Knobs", "How close the result stays", "What it costs", "When not to use it")


@pytest.mark.parametrize(("kind", "room"), KINDS, ids=[kind.__name__ for kind, _ in KINDS])
def test_every_technique_has_a_page_with_all_sections_and_knobs(
    kind: technique_pages.Kind, room: technique_pages.RoomPages
) -> None:
    text = page(kind, room)
    found = dict(re.findall(r"^## (.+)\n\n((?:(?!^## ).*\n)+)", text, flags=re.MULTILINE))
    assert set(SECTIONS) <= set(found) and all(found[section].strip() for section in SECTIONS)
    assert all(f"| `{field.name}` |" in found["Knobs"] for field in fields(kind))  # type: ignore[arg-type]
    assert stated_levels(kind) and f'--use "{kind.__name__}(' in text
    assert (ROOT / re.findall(r"`(shoestring/\S+\.py)`", text)[-1]).is_file()


def test_pages_are_written_by_room(tmp_path: Path) -> None:
    technique_pages.write(tmp_path)
    written = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.md")}
    assert written == {f"{room.name}/{kind.__name__}.md" for kind, room in KINDS}


def test_conflicts_stand_on_the_pages_of_both_with_the_reason() -> None:
    training = ROOMS[0]
    (line,) = [line for line in conflicts_of(Checkpoint, training) if line.startswith("`OffloadModel`")]
    assert "OffloadModel recomputes every block itself" in line and line in page(Checkpoint, training)


def test_a_docstring_that_does_not_say_what_it_costs_is_refused() -> None:
    @dataclass(frozen=True)
    class Silent(TrainingTechnique):
        """Says nothing more."""

    with pytest.raises(ValueError, match=r"Silent ends without the paragraphs `Costs"):
        parts_of_docstring(Silent)


def test_the_glossary_names_techniques_that_there_are() -> None:
    lines = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines()
    named = set(re.findall(r"`([A-Z]\w+)`", " ".join(line.split("|")[1] for line in lines if line.startswith("|"))))
    assert (
        {"DataParallel", "Checkpoint", "QuantizeUpdates"} <= named <= {kind.__name__ for kind, _ in KINDS} | {"Local"}
    )


def test_columns_of_a_docstring_become_blocks_of_code() -> None:
    assert doctest.testmod(docstring_markdown) == (0, 1)
