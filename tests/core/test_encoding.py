"""Text files are UTF-8 whatever the locale says: every call that opens one says so."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.core.test_private import FILES, ROOT

TEXTS = {"read_text": 0, "write_text": 1}  # name -> which argument is the encoding
PROCESSES = ("run", "Popen", "check_output")  # of subprocess, with text=True


def is_binary(call: ast.Call, place: int) -> bool:
    """Whether a file is opened for bytes. A mode that is not written here counts as text."""
    modes = [*call.args[place : place + 1], *(one.value for one in call.keywords if one.arg == "mode")]
    return any(isinstance(one, ast.Constant) and "b" in str(one.value) for one in modes)


def called(call: ast.Call) -> str:
    return (
        call.func.id
        if isinstance(call.func, ast.Name)
        else call.func.attr
        if isinstance(call.func, ast.Attribute)
        else ""
    )


def opened_by_locale(tree: ast.Module) -> Iterator[int]:
    """Lines of calls that open text in the encoding of the locale."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name, given, method = called(call), {one.arg for one in call.keywords}, isinstance(call.func, ast.Attribute)
        if "encoding" in given or ast.unparse(call.func) == "os.open":
            continue
        if (
            (name == "open" and not method and not is_binary(call, 1))
            or (
                name == "open"
                and method
                and call.args
                and isinstance(mode := call.args[0], ast.Constant)
                and "b" not in str(mode.value)
                and set(str(mode.value)) <= set("rwax+t")
            )
            or (name == "fdopen" and not is_binary(call, 1))
            or (name in TEXTS and len(call.args) <= TEXTS[name])
            or (name in PROCESSES and {"text", "universal_newlines"} & given)
        ):
            yield call.lineno


def test_no_text_is_read_or_written_in_the_encoding_of_the_locale() -> None:
    found = [
        f"{file}:{line}"
        for file in FILES
        for line in opened_by_locale(ast.parse((ROOT / file).read_text(encoding="utf-8")))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ("open('a')", True),
        ("open('a', 'w')", True),
        ("path.open('r')", True),
        ("path.open('rb')", False),
        ("open('a', 'rb')", False),
        ("open('a', mode='ab')", False),
        ("open('a', encoding='utf-8')", False),
        ("os.open('a', 0)", False),
        ("os.fdopen(3)", True),
        ("os.fdopen(3, 'w+b')", False),
        ("path.read_text()", True),
        ("path.write_text('a')", True),
        ("path.read_text('utf-8')", False),
        ("path.write_text('a', encoding='utf-8')", False),
        ("subprocess.run([], text=True)", True),
        ("subprocess.run([], text=True, encoding='utf-8')", False),
    ],
)
def test_the_search_sees_every_way_to_open_text(line: str, seen: bool) -> None:
    assert bool(list(opened_by_locale(ast.parse(line)))) == seen
