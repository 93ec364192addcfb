"""A whole room from outside: a package brings a subject, techniques, a budget, a command, a report and a page section.

No file of ours is edited for it. The room shortens texts: what counts is their size in bytes, and how many letters are lost.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import HUNG

ROOM = '''
"""Texts made smaller."""
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from shoestring.core.budget import Budget
from shoestring.core.exactness import Exactness
from shoestring.core.figures import Quantity, figures
from shoestring.core.technique import Technique, applied, parsed, text
from shoestring.planning.choose import Chooser, asked_for
from shoestring.planning.room import Candidate, Room

SIZE, LOST = Quantity("size_bytes", "size", counted=True), Quantity("lost", "letters lost", "letters")


@dataclass(frozen=True)
class Length:
    size: float
    lost: float = 0.0

    def numbers(self):
        return {"size_bytes": self.size, "lost": self.lost}


@dataclass(frozen=True)
class Strip(Technique[str, Length]):
    """Spaces at the end of lines; nobody misses them. Of ten characters, one is taken to be such a space."""
    order: ClassVar[int] = 10
    why: ClassVar[str] = "spaces that nobody sees"

    def cost(self, now):
        return replace(now, size=0.9 * now.size)

    def apply(self, words):
        return "\\n".join(line.rstrip() for line in words.splitlines())


@dataclass(frozen=True)
class Cut(Technique[str, Length]):
    to: int = 50   # percent of the text that stays

    order: ClassVar[int] = 20
    exact: ClassVar[bool] = False
    why: ClassVar[str] = "the end is left out"

    @classmethod
    def choices(cls, now):
        return cls(75), cls(50), cls(25)

    def cost(self, now):
        return Length(now.size * self.to / 100, now.lost + now.size * (1 - self.to / 100))

    def apply(self, words):
        return words[: len(words) * self.to // 100]


class Texts(Room):
    catalogue = (Strip, Cut)
    objective = LOST
    subject = "this text"

    def __init__(self, words):
        self.words = words

    def confirmed(self, one):
        return replace(one, known={**one.known, "size_bytes": float(len(applied(one.techniques, self.words)))})

    def sketched(self, one):
        return one


class Shorten:
    name, help = "shorten", "a text made small enough"

    def flags(self, parser):
        parser.add_argument("file")
        parser.add_argument("--size")
        parser.add_argument("--use", action="append")
        parser.add_argument("--report")

    def run(self, options):
        import json

        words = Path(options.file).read_text()
        plain = Length(len(words))
        if options.use:
            plan = asked_for(tuple(parsed(one, Texts.catalogue) for one in options.use), plain)
        else:
            plan = Chooser(Texts(words), plain).choice(Budget.parsed(size=options.size), (Exactness.CHANGED,)).chosen
        made = applied(plan.techniques, words)
        found = figures((SIZE, LOST), plan.numbers()).measured({"size_bytes": len(made), "lost": len(words) - len(made)})
        if options.report:
            from shoestring.show.page import page

            Path(options.report).write_text(page({"job": "shorten", "shortened": [text(one) for one in plan.techniques]}))
        if options.json:
            print(json.dumps({"plan": plan.as_json(), "measured": {one.quantity.name: one.measured for one in found}}))
        else:
            from shoestring.show.terminal import beside

            print(beside(found))
        return 0


shorten = Shorten()


def section(report):
    from markupsafe import Markup

    if "shortened" not in report:
        return ""
    return Markup("<section><h2>Shortened by</h2><p>{}</p></section>").format(" and ".join(report["shortened"]) + " <b>")
'''
ENTRIES = """[shoestring.commands]
shorten = texts:shorten

[shoestring.sections]
shortened = texts:section
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The package as pip would install it, and a text of a hundred characters, of which ten are spaces at the end of its lines."""
    (tmp_path / "texts.py").write_text(ROOM)
    told = tmp_path / "texts-1.0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: texts\nVersion: 1.0\n")
    (told / "entry_points.txt").write_text(ENTRIES)
    (tmp_path / "long.txt").write_text("abcd \n" * 9 + "z" * 46)
    return tmp_path


def shoestring(package: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", "shoestring", *words],
        cwd=package,
        capture_output=True,
        text=True,
        timeout=HUNG,
        env=os.environ | {"PYTHONPATH": path},
    )


def test_its_budget_is_met_by_the_same_chooser_and_its_figures_are_shown(package: Path) -> None:
    done = shoestring(package, "shorten", "long.txt", "--size", "95B", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["plan"]["techniques"] == [{"name": "Strip", "knobs": {}}] and told["measured"] == {
        "size_bytes": 91,
        "lost": 9,
    }
    assert told["plan"]["size_bytes"] == 91.0, "confirmed by the real thing; by arithmetic it would be 90"
    shown = shoestring(package, "shorten", "long.txt", "--size", "50B", "--report", "page.html").stdout
    assert shown.split()[:2] == ["predicted", "measured"] and "letters lost" in shown


def test_a_budget_that_it_can_not_meet_is_refused_as_ours_are(package: Path) -> None:
    done = shoestring(package, "shorten", "long.txt", "--size", "5B", "--json")
    assert done.returncode == 3 and "nothing fits 5 B" in done.stderr and "letters lost" in done.stderr
    assert json.loads(done.stdout)["nearest"]["techniques"][-1] == {"name": "Cut", "knobs": {"to": 25}}


def test_its_techniques_are_written_as_ours_are_and_a_mistake_gets_the_same_words(package: Path) -> None:
    forced = json.loads(shoestring(package, "shorten", "long.txt", "--use", "Cut(to=75)", "--json").stdout)
    assert (
        forced["plan"]["techniques"] == [{"name": "Cut", "knobs": {"to": 75}}]
        and forced["measured"]["size_bytes"] == 75
    )
    done = shoestring(package, "shorten", "long.txt", "--use", "Cut(too=75)")
    assert done.returncode == 2 and "Cut has no knob 'too'; it has to" in done.stderr and "Traceback" not in done.stderr


def test_its_section_stands_on_the_page_and_can_not_be_markup(package: Path) -> None:
    assert shoestring(package, "shorten", "long.txt", "--size", "50B", "--report", "page.html").returncode == 0
    drawn = (package / "page.html").read_text()
    assert "<h2>Shortened by</h2>" in drawn and "Cut()" in drawn and "&lt;b&gt;" in drawn
