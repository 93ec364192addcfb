"""Examples run as they are, and are short."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.waiting import HUNG

RECIPES = {"fine_tune"}  # job files that have a test of their own (test_recipe.py)
EXAMPLES = [
    path for path in sorted((Path(__file__).parent.parent / "examples").glob("*.py")) if path.stem not in RECIPES
]


@cache
def run(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=HUNG)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_has_at_most_forty_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 40
    assert run(path).returncode == 0, run(path).stderr[-2000:]


def test_the_exact_example_is_exact() -> None:
    assert "same bits after ten steps: True" in run(EXAMPLES[0]).stdout
