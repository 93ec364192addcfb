"""What ARCHITECTURE says of the source, read off the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "shoestring"
FILES = [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.rglob("*.py"))]

# Names with an underscore that their libraries document: a process's end without clean-up, and what every named tuple has
DOCUMENTED = {"_exit", "_replace", "_fields", "_asdict"}
# Who reads or changes variables of the environment: what starts processes or runs in one that was started, the commands, and who asks
# where caches are
ENVIRONMENT = (
    "commands/",
    "training/commands/",
    "show/output.py",
    "show/moving_line.py",
    "processes/",
    "training/execution/",
    "serving/replicas/model_handle.py",
    "measure/instructions.py",
    "measure/cache.py",
)
# Who prints: commands, and what all commands show of a run
PRINTING = ("commands/", "training/commands/", "show/output.py", "show/moving_line.py", "show/run_end.py")
TOO_LONG = 510  # lines of a file


def tree(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text())


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def private_names(file: str) -> Iterator[str]:
    """Private names of other people that a file uses: as an attribute, imported, or asked for with getattr."""
    for node in ast.walk(tree(file)):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case ast.Attribute(attr=name):
                names = [name]
            case ast.Import(names=found):
                names = [one.name for one in found]
            case ast.ImportFrom(module=module, names=found) if not (module or "").startswith("shoestring"):
                names = [module or "", *(one.name for one in found)]
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr"), args=[_, ast.Constant(value=str(name)), *_]
            ):
                names = [name]
            case _:
                continue
        for name in names:
            if is_private(name) and name not in DOCUMENTED:
                yield f"{file}:{node.lineno} {name}"  # type: ignore[attr-defined]


def test_one_file_touches_private_names() -> None:
    found = [use for file in FILES if file != "core/private.py" for use in private_names(file)]
    assert found == []
    assert list(private_names("core/private.py")), "the search finds what is there"


def test_only_commands_print() -> None:
    found = [
        f"{file}:{node.lineno}"
        for file in FILES
        if not (file.startswith(PRINTING) or file.endswith("command.py"))
        for node in ast.walk(tree(file))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert found == []


def test_the_environment_is_read_where_processes_start() -> None:
    found = [
        f"{file}:{node.lineno}"
        for file in FILES
        if not file.startswith(ENVIRONMENT)
        for node in ast.walk(tree(file))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv")
    ]
    assert found == []


def test_no_file_is_too_long() -> None:
    lengths = {file: len((ROOT / file).read_text().splitlines()) for file in FILES}
    assert {file: length for file, length in lengths.items() if length > TOO_LONG} == {}


@pytest.mark.parametrize(
    "line",
    [
        "x = tensor._version",
        "from torch import _C",
        "import torch._dynamo",
        "from torch._C import thing",
        "getattr(model, '_hooks', None)",
    ],
)
def test_the_search_sees_every_way_to_a_private_name(
    line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file.py").write_text(line)
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    assert list(private_names("file.py"))
