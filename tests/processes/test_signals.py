"""Signals that ask a command to stop: one that is ignored (nohup, `&`) stays ignored, another lets it save and is named."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.records import records
from tests.runs.test_resume import PLAN
from tests.waiting import HUNG, UNTIL_EXISTS

pytestmark = pytest.mark.usefixtures("warm_workers")

# Before its third batch it says so and waits until somebody opens the gate
JOB = (
    UNTIL_EXISTS
    + """
import sys, torch
from torch import nn
from shoestring import Job

def data():
    for number in range(6):
        if number == 2 and os.path.exists("a/events.jsonl") and "begun" in open("a/events.jsonl").read():   # not while it is planned
            print("at the gate", file=sys.stderr, flush=True)
            until_exists("gate")
        yield torch.ones(4, 8), torch.arange(4)

def job() -> Job:
    return Job(model=lambda: nn.Linear(8, 4), data=data, steps=6)
"""
)
# The same when it validates after its second round
GATED = (
    UNTIL_EXISTS
    + f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.federated.toys import records, toy_job

calls = []

def validate(model):
    calls.append(1)
    if len(calls) == 2:
        print("at the gate", file=sys.stderr, flush=True)
        until_exists("gate")
    return {{"loss": 1.0}}

def job():
    return toy_job(validate=validate)
"""
)
COMMANDS = {
    "train": ["train", "job.py", "--plan", "plan.json"],
    "group": ["train", "job.py", "--use", "DataParallel()", "--devices", "2"],
    "federate": ["federate", "toy.py", "--per-round", "6", "--rounds", "8", "--every", "1", "--processes", "2"],
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "toy.py").write_text(GATED)
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    return tmp_path


def at_the_gate(place: Path, words: Sequence[str], ignored: Sequence[int]) -> subprocess.Popen[str]:
    """A command that stands at the gate."""
    traps = "".join(f"trap '' {number:d}; " for number in ignored)
    child = subprocess.Popen(
        ["sh", "-c", f'{traps}exec "$@"', "sh", sys.executable, "-m", "shoestring", *words, "--run", "a"],
        cwd=place,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert child.stderr is not None, "the pipe was asked for"
    heard = []
    for line in child.stderr:
        heard.append(line)
        if "at the gate" in line:
            return child
    raise AssertionError(f"it ended before that: {heard}")


def open_gate(place: Path) -> None:
    (place / "gate").write_text("")


@pytest.mark.parametrize(
    ("number", "command"), [(signal.SIGHUP, "train"), (signal.SIGINT, "train"), (signal.SIGHUP, "federate")]
)
def test_a_signal_that_is_ignored_stays_ignored(number: int, command: str, place: Path) -> None:
    child = at_the_gate(place, COMMANDS[command], [number])
    child.send_signal(number)
    open_gate(place)
    _, said = child.communicate(timeout=HUNG)
    assert child.returncode == 0 and "stop" not in said, said
    assert records(place / "a")[-1]["event"] == "finished"


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (signal.SIGHUP, "asked to by SIGHUP"),
        (signal.SIGTERM, "asked to by SIGTERM"),
        (signal.SIGINT, "interrupted (Ctrl-C)"),
    ],
)
def test_any_other_stops_it_with_a_checkpoint_and_is_named(number: int, told: str, place: Path) -> None:
    child = at_the_gate(place, COMMANDS["train"], [])
    child.send_signal(number)
    assert child.stderr is not None and any("stopping after this step" in line for line in child.stderr)
    open_gate(place)
    _, said = child.communicate(timeout=HUNG)
    assert child.returncode == 130 and told in said and "goes on from there" in said, said
    assert list((place / "a" / "checkpoints").glob("step-*"))


def test_a_hangup_stops_a_federation_with_a_checkpoint_too(place: Path) -> None:
    child = at_the_gate(place, COMMANDS["federate"], [])
    child.send_signal(signal.SIGHUP)
    open_gate(place)
    _, said = child.communicate(timeout=HUNG)
    assert child.returncode == 130 and "asked to by SIGHUP" in said, said
    assert list((place / "a" / "checkpoints").glob("step-*"))


@pytest.mark.slow
@pytest.mark.parametrize("ignored", [[signal.SIGHUP], []], ids=["ignored", "not ignored"])
def test_a_group_keeps_the_same_rule(ignored: list[int], place: Path) -> None:
    child = at_the_gate(place, COMMANDS["group"], ignored)
    child.send_signal(signal.SIGHUP)
    if not ignored:
        assert child.stderr is not None and any("stopping after this step" in line for line in child.stderr)
    open_gate(place)
    _, said = child.communicate(timeout=HUNG)
    assert child.returncode == (0 if ignored else 130), said
    assert ("SIGHUP" in said) == (not ignored), said
