"""A test stands where its subject stands: `shoestring/runs/checkpoints/saver.py` is tested by `tests/runs/checkpoints/test_saver.py`.

Not every file has a test file of its name: small ones are tested together with what they serve, or by examples in their docstrings. The
share that has one may rise, and not fall.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEAST = 0.41


def has_functions(path: Path) -> bool:
    return any(isinstance(node, ast.FunctionDef) for node in ast.walk(ast.parse(path.read_text())))


def shares() -> dict[str, tuple[int, int]]:
    """For each room, how many of its files with functions have a test file of their name, and how many it has."""
    found: dict[str, tuple[int, int]] = {}
    for path in sorted((ROOT / "shoestring").rglob("*.py")):
        if path.name.startswith("__") or not has_functions(path):
            continue
        place = path.relative_to(ROOT / "shoestring")
        room = place.parts[0] if len(place.parts) > 1 else "shoestring"
        named, files = found.get(room, (0, 0))
        found[room] = named + (ROOT / "tests" / place.parent / f"test_{place.name}").exists(), files + 1
    return found


def test_no_fewer_files_have_a_test_file_of_their_name() -> None:
    named, files = (sum(column) for column in zip(*shares().values(), strict=True))
    assert named >= LEAST * files, f"{named} of {files}: {shares()}"
