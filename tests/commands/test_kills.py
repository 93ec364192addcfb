"""Commands that train, killed from outside: the same command goes on to the same result, one process at a time has a folder,
and it is watched meanwhile. Compressions have their own such tests (tests/compression/test_session.py).

A moment is a line in the run's events, counted from when the command was given, so no test looks at a clock.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from shoestring.commands.main import run
from shoestring.runs.events.event_log import NAME
from shoestring.runs.folder import holder
from shoestring.show.watch.follow import Watch
from tests.waiting import HUNG, PASS_GATE, Gates, until

JOB = (
    PASS_GATE
    + """
import torch
from torch import nn
from shoestring import Job
from shoestring.core.clients.clients import Numbered

def batches(hold):
    for number in range(12):
        pass_gate(hold, number)
        draw = torch.Generator().manual_seed(number)
        yield torch.randn(8, 12, generator=draw), torch.randint(0, 5, (8,), generator=draw)

def records(number, hold):
    pass_gate(hold, 5)
    draw = torch.Generator().manual_seed(number)
    return [(torch.randn(12, generator=draw), torch.randint(0, 5, (), generator=draw)) for _ in range(8)]

def job(hold: str = "", width: int = 16, steps: int = 12) -> Job:
    return Job(model=lambda: nn.Sequential(nn.Linear(12, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 5)),
               data=lambda: batches(hold), steps=steps, clients=lambda: Numbered(6, lambda number: records(number, hold)))
"""
)
COMMANDS = {
    "train": ["net.py", "--save-every", "2", "--use", "EMA(decay=0.9)"],
    "distill": ["net.py", "--teacher", "net.py@teacher.safetensors", "--save-every", "2", "--use", "EMA(decay=0.9)"],
    "federate": ["net.py", "--rounds", "6", "--per-round", "3", "--save-every", "1", "--processes", "1"],
}
SAME = ("weights_sha256", "losses", "steps", "techniques", "participants")
pytestmark = pytest.mark.usefixtures("warm_workers")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a job, and weights that teach it."""
    (tmp_path / "net.py").write_text(JOB)
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 5))
    save_file(layers.state_dict(), tmp_path / "teacher.safetensors")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words(command: str, folder: str) -> list[str]:
    return [command, *COMMANDS[command], "--hold", ".", "--run", folder, "--json"]


def begin(command: str, folder: str) -> subprocess.Popen[str]:
    called = [sys.executable, "-m", "shoestring", *words(command, folder)]
    return subprocess.Popen(called, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def report_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, said = process.communicate(timeout=HUNG)
    assert process.returncode == 0, said
    found = json.loads(out)
    return {name: found[name] for name in SAME if name in found}


def watched_state(place: Path, name: str) -> str:
    """What the watch page says of a run."""
    followed = Watch([place]).runs[name]
    followed.look(0.0)
    return followed.state


def lines(folder: Path) -> int:
    try:
        return (folder / NAME).read_bytes().count(b"\n")
    except OSError:
        return 0


def kill_at(command: str, folder: Path, line: int) -> bool:
    """Give a command, and kill it when it has written so many lines of events. Whether it was killed: it may be done before."""
    before = lines(folder)
    process = begin(command, folder.name)
    until(lambda: lines(folder) - before >= line or process.poll() is not None, "the moment")
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=HUNG)
    until(lambda: holder(folder) is None, "the end of its workers")
    return process.returncode == -signal.SIGKILL


def killed_and_gone_on(command: str, place: Path, kills: int) -> None:
    whole = report_of(begin(command, "whole"))
    moments, draw = lines(place / "whole"), random.Random(command)
    killed = 0
    for _ in range(kills):
        killed += kill_at(command, place / "killed", draw.randrange(moments))
    assert killed, "no moment was before its end"
    assert report_of(begin(command, "killed")) == whole
    assert not list((place / "killed").rglob("*.tmp-*"))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_killed_command_goes_on_to_the_same_result(command: str, place: Path) -> None:
    killed_and_gone_on(command, place, 2)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_is_killed_twenty_times_goes_on_to_the_same_result(command: str, place: Path) -> None:
    killed_and_gone_on(command, place, 20)


@pytest.mark.parametrize("command", COMMANDS)
def test_of_two_in_one_folder_one_is_refused_and_the_other_is_watched(
    command: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = place / "run" / NAME
    with Gates(place, 5):
        first = begin(command, "run")
        until(
            lambda: first.poll() is not None or (lines(place / "run") and '"begun"' in events.read_text()), "its begin"
        )
        assert run(words(command, "run")) == 2
        assert f"run is in use by process {holder(place / 'run')}" in capsys.readouterr().err
        assert watched_state(place, "run") == "running"
    assert report_of(first)["steps"] > 0
    assert watched_state(place, "run") == "finished"
    assert run(words(command, "run")) == 0
    assert json.loads(capsys.readouterr().out)["weights_sha256"], "what is finished is reported"
