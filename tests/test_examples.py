"""Examples run as they are, and are short."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import HUNG

RECIPES = {"fine_tune"}  # job files that have a test of their own (test_recipe.py)
EXAMPLES = [
    path for path in sorted((Path(__file__).parent.parent / "examples").glob("*.py")) if path.stem not in RECIPES
]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_has_at_most_forty_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 40
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=HUNG)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_exact_example_is_exact() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLES[0])], capture_output=True, text=True, timeout=HUNG)
    assert "same bits after ten steps: True" in done.stdout
