"""How long a launcher waits for a worker that says nothing, and what it tells of it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shoestring.core.errors import Mistake
from shoestring.processes.standstill import VARIABLE, Silence, deadline_of, lines_in_time, no_answer, standing_place
from tests.tasks import train_task

JOB = """
import select
from shoestring.processes.standstill import answer_when_asked
def model():
    print("here", flush=True) or select.select([], [], [])  # for ever
answer_when_asked()
model()
"""


def test_lines_come_as_they_are_until_nothing_comes() -> None:
    reader, writer = os.pipe()
    waits = iter([(b"one\ntw", True), (b"o\n\nthree", True), (b"", False)])
    deadlines = []

    def wait(file: int, seconds: float | None) -> bool:
        text, comes = next(waits)
        deadlines.append(seconds)
        os.write(writer, text)
        return comes

    lines = lines_in_time(reader, 1800, wait)
    assert [next(lines), next(lines), next(lines)] == [b"one", b"two", b""]
    with pytest.raises(Silence):
        next(lines)
    os.write(writer, b"four\n")
    os.close(writer)
    assert list(lines_in_time(reader, 60)) == [b"four"] and deadlines == [1800] * 3
    os.close(reader)


def test_only_training_in_a_folder_may_be_silent_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = train_task(tmp_path / "my.py", 3)
    assert deadline_of(train_task(tmp_path / "my.py", 3, folder=tmp_path)) is None
    assert deadline_of(task) == deadline_of(replace(task, steps=None)) == 1800
    told = str(no_answer(task, "my.py line 5"))
    assert "no result came for 30 min, and the job stands in my.py line 5" in told and f"{VARIABLE}=60m" in told
    monkeypatch.setenv(VARIABLE, "2h")
    assert deadline_of(task) == 7200
    monkeypatch.setenv(VARIABLE, "long")
    with pytest.raises(Mistake, match=f"{VARIABLE}: 'long' is not a time"):
        deadline_of(task)


def test_a_worker_that_stands_still_tells_the_line_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text(JOB)
    with (
        open(tmp_path / "said", "w+b") as said,
        subprocess.Popen(
            [sys.executable, str(tmp_path / "my.py")], stdout=subprocess.PIPE, stderr=said, encoding="utf-8"
        ) as child,
    ):
        assert child.stdout is not None and child.stdout.readline() == "here\n"
        assert standing_place(child, said) == "my.py line 5"
    assert child.returncode, "asked, it ends"
