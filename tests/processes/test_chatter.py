"""What a job says is shown once while it is planned, and is never in the way of a result."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shoestring.core.errors import Crashed, Mistake
from shoestring.processes.chatter import overheard
from shoestring.processes.launch import run_worker
from shoestring.training.evidence.tasks import AnchorTask

pytestmark = pytest.mark.usefixtures("warm_workers")

JOB = """
import sys, warnings
import torch
from shoestring import Job

print("the file says this")

def model():
    print("making the model")
    print("loading: 50 %\\rloading: 100 %", file=sys.stderr)
    warnings.warn("this model is old")
    return torch.nn.Linear(16, 16)

def job(steps: int = 2) -> Job:
    return Job(model=model, data=lambda: [(torch.zeros(8, 16), torch.zeros(8, dtype=torch.long))] * 4, steps=steps)
"""


def test_every_line_is_shown_once_on_the_error_stream(capsys: pytest.CaptureFixture[str]) -> None:
    with overheard() as aloud:
        for _ in range(3):
            print("one")
            print("two", file=sys.stderr)
        sys.stdout.write("no end of line")
        aloud(print)("ours")
    out, err = capsys.readouterr()
    assert out == "ours\n" and err == "one\ntwo\nno end of line\n"


def test_what_was_kept_silent_is_shown_after_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with overheard(silent=True):
        print("nobody needs this")
    assert capsys.readouterr() == ("", "")
    with pytest.raises(Mistake), overheard(silent=True):
        print("it began here")
        raise Mistake("no")
    assert capsys.readouterr() == ("", "it began here\n")


@pytest.mark.parametrize("command", ["plan", "train"])
def test_a_job_that_talks_is_heard_once_and_json_stays_json(command: str, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    done = subprocess.run(
        [sys.executable, "-m", "shoestring", command, "job.py", "--use", "Checkpoint(every=1)", "--json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    for line in ("the file says this", "making the model", "loading: 100 %", "UserWarning: this model is old"):
        assert done.stderr.count(line) == 1, (line, done.stderr)


def test_a_worker_that_fails_shows_what_it_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.py").write_text(
        JOB.replace('warnings.warn("this model is old")', "import os; sys.stdout.flush(); os._exit(3)")
    )
    with pytest.raises(Crashed, match="exit code 3"):
        run_worker(AnchorTask(file=str(tmp_path / "job.py"), variants={"": ()}), {})
    assert "making the model" in capsys.readouterr().err
    (tmp_path / "job.py").write_text(
        JOB.replace('warnings.warn("this model is old")', 'raise ValueError("no such layer")')
    )
    with pytest.raises(Mistake, match="no such layer"):
        run_worker(AnchorTask(file=str(tmp_path / "job.py"), variants={"": ()}), {})
    assert not capsys.readouterr().err
