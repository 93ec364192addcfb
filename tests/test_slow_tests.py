"""The list of slow tests names tests that are there, and leaves something of every file."""

from __future__ import annotations

import re
from pathlib import Path

from tests.slow_tests import file_of, function_of, listed

ROOT = Path(__file__).parent.parent


def test_what_is_listed_is_there() -> None:
    gone = []
    for test in listed():
        file, name = ROOT / file_of(test), function_of(test).rpartition("::")[2]
        if not file.exists() or not re.search(rf"^\s*def {re.escape(name)}\(", file.read_text(), re.MULTILINE):
            gone.append(test)
    assert not gone, f"renamed or deleted; write slow.txt anew (tests/slow_tests.py): {gone}"
