"""What stands in README, ARCHITECTURE, docs/, decisions/ and docstrings is there: linked files, named tests, commands with their flags,
techniques with their knobs. And pages that are to be short are short."""

from __future__ import annotations

import ast
import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from shoestring.commands.main import own_commands
from shoestring.commands.parser import Parser
from shoestring.compression.catalogue import CATALOGUE as COMPRESSION
from shoestring.core.command_line.arguments import add_flags
from shoestring.core.command_line.command import named_object
from shoestring.core.technique import Technique, parse_technique
from shoestring.federated.catalogue import CATALOGUE as FEDERATED
from shoestring.serving.catalogue import CATALOGUE as SERVING
from shoestring.training.catalogue import CATALOGUE as TRAINING

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "decisions/*.md", "benchmarks/README.md")
    for path in ROOT.glob(pattern)
)
NAMED = re.compile(r"(?<![\w/.-])((?:tests|shoestring|benchmarks|examples|docs)/[\w/.-]*\w\.(?:py|md|json|png))")
OF_JOBS = {"width", "depth", "lr", "batch", "frozen", "of", "share", "flags", "amount"}  # flags of jobs that pages name
KINDS = {"federate": FEDERATED, "compress": COMPRESSION, "serve": SERVING}


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_links_and_named_files_are_there(page: str) -> None:
    prose = re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    targets = [target for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", prose) if "://" not in target]
    absent = [target for target in targets if not (ROOT / page).parent.joinpath(target).exists()]
    if page != "CHANGELOG.md":  # which tells of what was
        absent += [name for name in NAMED.findall(prose) if not (ROOT / name).exists()]
    assert absent == []


def test_tests_that_docstrings_name_are_there() -> None:
    absent = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in (ROOT / "shoestring").rglob("*.py")
        for name in NAMED.findall(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "")
        if name.startswith("tests/") and not (ROOT / name).exists()
    }
    assert absent == set()


def commands(page: str) -> list[list[str]]:
    """The words of every command of ours that a page shows, in blocks of code or in backquotes."""
    text = text_of(page)
    shown = re.findall(r"^(?: {4}|\$ )(shoestring .+)$", text, flags=re.MULTILINE) + re.findall(
        r"`(shoestring [^`]+)`", text
    )
    return [words(line) for line in shown]


def words(line: str) -> list[str]:
    """The words of a command line, without what is said beside it."""
    return shlex.split(re.split(r" {3,}|(?<= )#|\\?\|", line)[0])


def known_flags(command: str) -> set[str]:
    parser = Parser(prog=command)
    add_flags(parser, named_object(own_commands()[command].options))
    return set(parser.known) | {f"--{name}" for name in OF_JOBS}


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md" and commands(page)])
def test_commands_have_the_flags_and_techniques_that_they_are_shown_with(page: str) -> None:
    names = set(own_commands())
    for line in commands(page):
        command = line[1] if len(line) > 1 else "--help"
        if command.startswith("-"):
            continue
        assert command in names, line
        flags = {word for word in line[2:] if word.startswith("--")}
        assert flags - {"--no-"} <= known_flags(command) | {"--student-NAME"}, line
        for flag, value in pairwise(line):
            if flag == "--use" and "..." not in value:
                kinds: tuple[type[Technique], ...] = KINDS.get(command, TRAINING)  # type: ignore[type-arg]
                assert parse_technique(value, kinds)


def test_architecture_is_a_page() -> None:
    lines = text_of("ARCHITECTURE.md").splitlines()
    assert len(lines) <= 200 and max(map(len, lines)) <= 120


def test_tables_of_the_readme_fit_beside_each_other() -> None:
    assert max(len(line) for line in text_of("README.md").splitlines() if line.startswith("|")) <= 100
