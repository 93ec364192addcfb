"""Standard streams that are closed, full, read no further or without our characters: a command does its work and says what it can."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shoestring.commands.main import main
from tests.records import records
from tests.runs.test_resume import PLAN
from tests.waiting import HUNG

pytestmark = pytest.mark.usefixtures("warm_workers")

# It prints, as jobs do, in characters of its own
JOB = """# größe
import sys, torch
from torch import nn
from shoestring import Job

def data():
    for number in range(40):
        print("naïve … 世界", flush=True)
        print("naïve … 世界", file=sys.stderr, flush=True)
        yield torch.ones(4, 8), torch.arange(4)

def job() -> Job:
    return Job(model=lambda: nn.Linear(8, 4), data=data, steps=40)
"""
COLD = sys.executable  # an interpreter looks at its streams and decides on encodings when it starts
TRAIN = "train job.py --plan plan.json --run a"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "job.py").write_text(JOB, encoding="utf-8")
    (tmp_path / "plan.json").write_text(json.dumps(PLAN), encoding="utf-8")
    return tmp_path


def shell(place: Path, line: str) -> subprocess.CompletedProcess[str]:
    """A line of a shell, in which `$S` is shoestring; what a pipe ends with is what the command ended with."""
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line.replace("$S", f"{sys.executable} -m shoestring")],
        cwd=place,
        capture_output=True,
        encoding="utf-8",
        timeout=HUNG,
    )


def finished(place: Path) -> bool:
    return bool(records(place / "a")[-1]["event"] == "finished")


@pytest.mark.parametrize(
    "closed",
    ["<&- >&- 2>&-", pytest.param(">&-", marks=pytest.mark.slow), pytest.param("2>&-", marks=pytest.mark.slow)],
)
def test_a_stream_that_is_closed_is_silent(closed: str, place: Path) -> None:
    done = shell(place, f"{COLD} -m shoestring {TRAIN} {closed}")
    assert done.returncode == 0 and "Error" not in done.stderr, done.stderr
    assert finished(place)
    events = (place / "a" / "events.jsonl").read_text(encoding="utf-8").splitlines()
    assert all(json.loads(line) for line in events), "nothing that was printed is there"


def test_a_full_output_is_told_as_what_it_is(place: Path) -> None:
    done = shell(place, f"$S {TRAIN} > /dev/full")
    assert done.returncode == 1 and finished(place)
    assert done.stderr.endswith(
        "shoestring: standard output can't be written (No space left on device), and what should be there is lost; "
        "what it did is kept\n"
    ), done.stderr
    assert "--run" not in done.stderr and shell(place, f"$S {TRAIN} 2> /dev/full").returncode == 0


@pytest.mark.parametrize("words", ["--help", "train --help", "--version"])
def test_help_that_can_not_be_written_is_told_too(words: str, place: Path) -> None:
    done = shell(place, f"$S {words} > /dev/full")
    assert done.returncode == 1 and done.stderr.endswith("and what should be there is lost\n"), done.stderr


@pytest.mark.parametrize("line", ["$S {} | head -1", "$S {} 2>&1 | head -1", "$S {} --json | true"])
def test_a_training_goes_on_when_nobody_reads_on(line: str, place: Path) -> None:
    done = shell(place, line.format(TRAIN))
    assert done.returncode == 0 and "roken pipe" not in done.stderr + done.stdout, done.stderr
    assert finished(place)


def test_other_commands_end_quietly_when_nobody_reads_on(place: Path) -> None:
    done = shell(place, "$S doctor | true")
    assert done.returncode == 141 and "roken" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    "locale",
    [
        "LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0",
        pytest.param("LC_ALL=C", marks=pytest.mark.slow),
        pytest.param("PYTHONIOENCODING=ascii", marks=pytest.mark.slow),
    ],
)
def test_no_locale_keeps_a_job_from_being_read_or_from_printing(locale: str, place: Path) -> None:
    done = shell(place, f"export {locale}; {COLD} -m shoestring {TRAIN}")
    assert done.returncode == 0 and finished(place), done.stderr
    assert "na\\xefve ... \\u4e16\\u754c" in done.stderr


def test_a_job_in_another_encoding_that_it_names_is_python(place: Path) -> None:
    (place / "job.py").write_bytes(
        ("# -*- coding: latin-1 -*-\n" + JOB.replace("世界", "")).encode("latin-1", "replace")
    )
    done = shell(place, f"$S {TRAIN}")
    assert done.returncode == 0, done.stderr
    assert (place / "a" / "job.py").read_bytes() == (place / "job.py").read_bytes()


def test_streams_of_a_test_or_a_notebook_stay(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    with pytest.raises(SystemExit):
        main(["--help"])
    assert (sys.stdout, sys.stderr) == before and "usage" in capsys.readouterr().out
