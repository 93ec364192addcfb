"""No test depends on time: none sleeps or looks at a clock itself, nor does a program that a test writes. They wait by tests/waiting.py,
and what is tested is handed a clock that counts.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
CLOCKS = (
    "sleep",
    "time",
    "time_ns",
    "monotonic",
    "monotonic_ns",
    "perf_counter",
    "perf_counter_ns",
    "process_time",
    "thread_time",
)
CALLED = re.compile(rf"\btime\.({'|'.join(CLOCKS)})\(|\bfrom time import\b")
ALLOWED = {
    "waiting.py": "the one place that waits",
    "show/made_runs.py": "events bear the hour, and pages say how long ago the last one was",
    "golden/job.py": "its bytes are those of the job that golden runs were begun with",
}


def clocks_in(source: str) -> list[str]:
    """Uses of the time module in a program, and in programs that it holds as text."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
        ):
            if node.func.value.id in ("time", "asyncio") and node.func.attr in CLOCKS:
                found.append(f"line {node.lineno}: {node.func.value.id}.{node.func.attr}()")
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            found.append(f"line {node.lineno}: from time import")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and (text := CALLED.search(node.value)):
            found.append(f"line {node.lineno}: {text.group()} in a text")
    return found


def test_no_test_sleeps_or_looks_at_a_clock() -> None:
    files = [
        path
        for path in sorted(TESTS.rglob("*.py"))
        if not path.relative_to(TESTS).parts[1:] or "version-" not in str(path)
    ]
    found = {str(path.relative_to(TESTS)): clocks for path in files if (clocks := clocks_in(path.read_text()))}
    found.pop(Path(__file__).name, None)  # the examples below
    assert found.keys() - ALLOWED.keys() == set(), {name: found[name] for name in found.keys() - ALLOWED.keys()}
    assert found.keys() == ALLOWED.keys(), "what is allowed is also used"


@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.sleep(1)",
        "import time\nbegun = time.perf_counter()",
        "from time import monotonic",
        "import asyncio\nasyncio.sleep(1)",
        "JOB = 'import time\\ntime.sleep(0.1)'",
    ],
)
def test_every_way_to_a_clock_is_seen(source: str) -> None:
    assert clocks_in(source)
    assert not clocks_in("clock()\nprobe.time\n'seconds of time'")
