"""The warm Python behaves as a cold one, for whoever starts it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import HUNG, until, until_gone
from tests.warm import python


@pytest.mark.parametrize(
    "words",
    [
        ["-m", "shoestring", "--help"],
        ["-m", "shoestring", "plan", "nothing.py"],
        ["-m", "shoestring", "dance"],
        ["-c", "import sys; print(sys.argv); sys.exit(7)", "a", "b c"],
        ["-c", "# warm\nimport sys\nprint(sys.argv, __name__)\nsys.exit(7)", "a", "b c"],
    ],
)
def test_it_says_the_same_and_ends_the_same(words: list[str], tmp_path: Path) -> None:
    cold, warm = (
        subprocess.run([one, *words], cwd=tmp_path, capture_output=True, text=True)
        for one in (sys.executable, python())
    )
    assert (warm.returncode, warm.stdout, warm.stderr) == (cold.returncode, cold.stdout, cold.stderr)


JOB = """
import os, signal
from shoestring import Job
def job() -> Job:
    open("pid", "w").write(str(os.getpid()))
    signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_reaches_the_command(number: int, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    child = subprocess.Popen([python(), "-m", "shoestring", "plan", "job.py"], cwd=tmp_path, stderr=subprocess.DEVNULL)
    command = int(until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the job"))
    child.send_signal(number)
    assert child.wait(HUNG) == -number
    until_gone(command)


def test_the_server_ends_with_the_tests_however_they_end(tmp_path: Path) -> None:
    code = "import signal\nfrom tests.warm import python\nprint(python(), flush=True)\nsignal.pause()\n"
    tests = subprocess.Popen(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True
    )
    assert tests.stdout is not None
    program = tests.stdout.readline().strip().encode()
    servers = [
        int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if words_of(path)[-2:-1] == [program]
    ]
    tests.kill()
    tests.wait()
    tests.stdout.close()
    assert len(servers) == 1
    until_gone(servers[0])


def words_of(path: Path) -> list[bytes]:
    """The words that a process was started with, and an empty one after them."""
    try:
        return path.read_bytes().split(b"\0")
    except OSError:  # it ended meanwhile
        return []


@pytest.mark.parametrize(("limit", "cold"), [("true", False), ("ulimit -n 200", True)])
def test_under_a_limit_a_process_is_a_cold_one(limit: str, cold: bool, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import sys\ndef job():\n    raise KeyError(sys.executable)\n")
    words = [python(), "-m", "shoestring", "plan", "job.py"]
    done = subprocess.run(
        ["sh", "-c", f'{limit}; exec "$@"', "sh", *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2 and (sys.executable if cold else python()) in done.stderr, done.stderr
