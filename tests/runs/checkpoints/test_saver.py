"""A disk that is full: older checkpoints make room for newer ones, and a run is not finished before its last weights are saved."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shoestring.runs.checkpoints.cadence import Cadence
from shoestring.runs.checkpoints.checkpoints import BEST, RunCheckpoint, forget_best, list_checkpoints, make_room
from shoestring.runs.checkpoints.saver import Saver, Snapshot
from shoestring.runs.events.event import Event, Saved, Warned
from shoestring.runs.weights import tensors
from tests.records import records, steps_in
from tests.waiting import HUNG

pytestmark = pytest.mark.usefixtures("warm_workers")


def steps_of(folder: Path) -> list[int]:
    return [one.step for one in list_checkpoints(folder)]


class Disk:
    """Writes of tensors fail as long as all files under a folder have more than `room` bytes."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.room, self.write_all = folder, 1 << 40, tensors.write_all
        monkeypatch.setattr(tensors, "write_all", self.write)

    def write(self, file: int, data: Any) -> None:
        taken = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        if taken + len(memoryview(data).cast("B")) > self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.write_all(file, data)


@pytest.fixture
def told() -> list[Event]:
    return []


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(tmp_path, monkeypatch)


def save(saver: Saver, number: int) -> None:
    saver.losses = [float(number)]  # so the first is the best
    saver.save(lambda: Snapshot(number, {"w": torch.full((25_000,), float(number))}, {}, {"step": number}))  # 100 kB
    saver.wait()


@pytest.mark.parametrize(
    ("room", "keeps"), [(450_000, 3), (350_000, 2), (250_000, 1)]
)  # as many as leave room for another one
def test_on_a_full_disk_saving_goes_on_with_as_many_checkpoints_as_fit(
    room: int, keeps: int, tmp_path: Path, disk: Disk, told: list[Event]
) -> None:
    saver = Saver(tmp_path, Cadence(steps=1, keep=3), told.append)
    for number in range(1, 6):
        save(saver, number)
    assert steps_of(tmp_path) == [1, 3, 4, 5]
    disk.room = room
    for number in range(6, 20):
        save(saver, number)
    late = [event.step for event in told if isinstance(event, Saved) and event.step > 9]
    assert late == list(range(10, 20)), "after a few warnings every one is saved"
    assert len(steps_of(tmp_path)) == keeps and steps_of(tmp_path)[-1] == 19
    assert (1 in steps_of(tmp_path)) == (keeps > 1), "the best one goes last"


def test_where_there_is_room_for_one_alone_it_stays_and_is_told_of(
    tmp_path: Path, disk: Disk, told: list[Event]
) -> None:
    saver = Saver(tmp_path, Cadence(steps=1, keep=3), told.append)
    for number in range(1, 4):
        save(saver, number)
    disk.room = 150_000
    for number in range(4, 9):
        save(saver, number)
    assert steps_of(tmp_path) == [3]
    warnings = [event.text for event in told if isinstance(event, Warned)]
    assert len(warnings) == 5 and "that of step 2 was removed to make room for the next" in warnings[0]
    assert "that of step 1 was removed" in warnings[1] and all(
        "the checkpoints before it stay" in text for text in warnings[2:]
    )
    disk.room = 1 << 40
    save(saver, 9)
    assert steps_of(tmp_path) == [9]


def test_a_damaged_checkpoint_is_not_what_everything_else_makes_room_for(
    tmp_path: Path, disk: Disk, told: list[Event]
) -> None:
    saver = Saver(tmp_path, Cadence(steps=1, keep=3), told.append)
    for number in range(1, 4):
        save(saver, number)
    (tmp_path / "step-00000003" / "weights.safetensors").write_bytes(b"")
    assert [make_room(tmp_path, 1), make_room(tmp_path, 1)] == [RunCheckpoint(tmp_path / "step-00000001"), None]
    assert steps_of(tmp_path) == [2, 3]


def save_best(saver: Saver, number: int) -> None:
    saver.save_best(
        lambda: Snapshot(number, {"w": torch.full((25_000,), float(number))}, {}, {"step": number, "parts": {}})
    )
    saver.wait()


def knowing(saver: Saver, number: int, best: int) -> None:
    """A checkpoint that knows which weights were best."""
    state = {"step": number, "parts": {"course": {"best": (0.5, best)}}}
    saver.save(lambda: Snapshot(number, {"w": torch.zeros(10)}, {}, state))
    saver.wait()


def test_best_weights_that_do_not_fit_the_disk_cost_a_warning_and_those_before_stay(
    tmp_path: Path, disk: Disk, told: list[Event]
) -> None:
    saver = Saver(tmp_path, Cadence(steps=1, keep=3), told.append)
    save_best(saver, 1)
    disk.room = 150_000
    save_best(saver, 2)
    assert [one.step for one in list_checkpoints(tmp_path, BEST)] == [1] and not list(tmp_path.glob("*.tmp-*"))
    (warning,) = (event.text for event in told if isinstance(event, Warned))
    assert "best in validation could not be saved (No space left on device): training goes on" in warning


def test_best_weights_stay_as_long_as_a_checkpoint_knows_of_them_or_may_come_to(
    tmp_path: Path, told: list[Event]
) -> None:
    def best() -> list[int]:
        return [one.step for one in list_checkpoints(tmp_path, BEST)]

    saver = Saver(tmp_path, Cadence(steps=1, keep=2), told.append)
    saver.by_loss = False
    save_best(saver, 4)
    knowing(saver, 5, 4)
    save_best(saver, 8)
    assert best() == [4, 8], "a run that is killed now goes on from step 5, and knows 4"
    knowing(saver, 9, 8)
    assert best() == [4, 8], "if 9 is damaged it goes on from 5"
    save_best(saver, 10)
    knowing(saver, 10, 10)
    assert best() == [8, 10], "nothing goes back to 5 any more"
    knowing(saver, 11, 10)
    assert best() == [10]
    save_best(saver, 12)
    forget_best(tmp_path, 11)
    assert best() == [10], "the life that found 12 was given up"
    assert not any(event.best for event in told if isinstance(event, Saved) and event.checkpoint.startswith("step"))


JOB = """
import os, resource
import torch
from torch import nn
from shoestring import Job

def data():
    for number in range(100):
        full = os.path.exists("full") and number >= 9
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000 if full else most, most))   # events still fit, checkpoints do not
        x = torch.randn(16, 64)
        yield x, x[:, :4].argmax(1)

def job() -> Job:
    return Job(model=lambda: nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, 4)), data=data, steps=12)
"""
PLAN = {
    "shoestring": 3,
    "chosen": {
        "techniques": [],
        "peak_bytes": 1 << 20,
        "process_bytes": 1 << 29,
        "step_seconds": 0.01,
        "exactness": "to rounding",
    },
}


def test_a_run_whose_last_weights_could_not_be_saved_is_not_finished_and_the_same_command_saves_them(
    tmp_path: Path,
) -> None:
    (tmp_path / "small.py").write_text(JOB)
    (tmp_path / "saved.json").write_text(json.dumps(PLAN))
    (tmp_path / "full").touch()

    def shoestring(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "shoestring", *words], cwd=tmp_path, capture_output=True, text=True, timeout=HUNG
        )

    words = ("train", "small.py", "--run", "a", "--plan", "saved.json", "--save-every", "4", "--json")
    first = shoestring(*words)
    assert first.returncode == 1 and not first.stdout, first.stderr
    assert (
        "all 12 steps are done, but the weights after the last one could not be saved (File too large), and the last checkpoint is of "
        "step 8: free some space and give the same command"
    ) in first.stderr
    lost = [event["loss"] for event in steps_in(records(tmp_path / "a"))]
    assert (
        len(lost) == 12
        and records(tmp_path / "a")[-1]["event"] == "failed"
        and not (tmp_path / "a" / "report.json").exists()
    )

    old = shoestring("export", "a", "--to", "safetensors", "--json")
    told = json.loads(old.stdout)
    assert (
        old.returncode == 0
        and told["step"] == 8
        and "the run went on to step 12, which is not saved" in told["notes"][0]
    )
    assert told["notes"][0] in old.stderr

    (tmp_path / "full").unlink()
    second = shoestring(*words)
    assert second.returncode == 0, second.stderr
    assert json.loads(second.stdout)["losses"] == lost and steps_of(tmp_path / "a" / "checkpoints")[-1] == 12
    assert [event["step"] for event in records(tmp_path / "a") if event["event"] == "begun"] == [0, 8]


@pytest.mark.slow
@pytest.mark.parametrize("use", ["Shard(stage=3)", "Asynchronous(kind='server')"])
def test_a_group_whose_last_weights_could_not_be_saved_says_so_too(use: str, tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(JOB)
    words = [
        sys.executable,
        "-m",
        "shoestring",
        "train",
        "small.py",
        "--run",
        "a",
        "--devices",
        "2",
        "--use",
        use,
        "--inexact",
        "--json",
        "--save-every",
        "4",
    ]
    (tmp_path / "full").touch()
    first = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=HUNG)
    assert first.returncode == 1 and "could not be saved (File too large)" in first.stderr, first.stderr
    (tmp_path / "full").unlink()
    second = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=HUNG)
    assert second.returncode == 0 and json.loads(second.stdout)["steps"] == 12, second.stderr
    assert steps_of(tmp_path / "a" / "checkpoints")[-1] == 12
