"""Whose a run's folder is: a start that came to nothing claims none, and a mistake before the first step leaves no run behind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoestring
from shoestring import Job, Mistake
from shoestring.core.errors import OverBudget
from shoestring.runs.checkpoints.cadence import Cadence
from shoestring.runs.checkpoints.saver import Saver, Snapshot
from shoestring.runs.events.event import Adopted, Begun, Event, Failed, Planning, Stepped, Warned
from shoestring.runs.events.event_log import note, read
from shoestring.runs.folder import Lock
from shoestring.runs.request import Request
from shoestring.runs.resume import OpenedRun, came_to_nothing, forget_attempt, open_run, without_a_step


def asked(path: Path, width: int, adopt: bool = False) -> OpenedRun:
    return open_run(path / "run", Request(job="/my.py", flags={"width": width}), b"", False, adopt)


def start(path: Path, width: int, *events: Event) -> None:
    held = asked(path, width)
    held.folder.write("plan.json", {"chosen": {"width": width}})
    for event in events:
        note(held.folder.path, event)
    held.lock.release()


@pytest.mark.parametrize("adopt", [False, True])
@pytest.mark.parametrize(
    "events", [(), (Planning(None),), (Planning(None), Failed("no")), (Begun(pid=1, steps=9, step=0, how=""),)]
)
def test_a_folder_without_a_finished_step_is_taken_by_whoever_asks_for_something_else(
    events: tuple[Event, ...], adopt: bool, tmp_path: Path
) -> None:
    start(tmp_path, 8, *events)
    held = asked(tmp_path, 16, adopt)
    assert held.changed and held.request.flags == {"width": 16} and not held.folder.read("plan.json")
    assert not read(held.folder.path).events
    held.lock.release()


def test_the_same_request_goes_on_with_its_plan(tmp_path: Path) -> None:
    start(tmp_path, 8, Planning(None))
    held = asked(tmp_path, 8)
    assert not held.changed and held.folder.read("plan.json")["chosen"] == {"width": 8}
    held.lock.release()


def test_two_at_once_are_refused_before_the_first_step_too(tmp_path: Path) -> None:
    held = asked(tmp_path, 8)
    with pytest.raises(Mistake, match="in use by process"):
        asked(tmp_path, 16)
    assert held.folder.request() is not None
    held.lock.release()


@pytest.mark.parametrize("written", ["modules.json", "modules.json.tmp-0123456789ab", "its.own"])
def test_a_folder_in_which_another_process_is_beginning_is_called_that(written: str, tmp_path: Path) -> None:
    """Before run.json is there, and not: no run of shoestring."""
    (tmp_path / "run").mkdir()
    lock = Lock(tmp_path / "run")
    (tmp_path / "run" / written).touch()
    with pytest.raises(Mistake, match=f"by process {os.getpid()}|process {os.getpid()} is beginning a run in"):
        asked(tmp_path, 8)
    lock.release()


def test_what_a_killed_process_left_of_its_start_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    Lock(tmp_path / "run").release()
    (tmp_path / "run" / "modules.json").touch()
    asked(tmp_path, 8).lock.release()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "modules.json").touch()
    with pytest.raises(Mistake, match="not a run of shoestring"):  # no lock: it is the user's own file
        open_run(tmp_path / "other", Request(job="/my.py"), b"", False, False)


@pytest.mark.parametrize("left", ["events.jsonl", "checkpoints/step-4", "privacy.jsonl"])
def test_what_a_step_has_left_claims_the_folder(left: str, tmp_path: Path) -> None:
    start(tmp_path, 8, *[Stepped(1, 0.5, 0.1, 1, 1)] * (left == "events.jsonl"))
    if left.startswith("checkpoints"):
        (tmp_path / "run" / left).mkdir(parents=True)
    else:
        (tmp_path / "run" / left).touch()
    assert not without_a_step(tmp_path / "run")
    with pytest.raises(Mistake, match="--width changed: 8 before, now 16"):
        asked(tmp_path, 16)
    held = asked(tmp_path, 16, adopt=True)
    assert isinstance(read(held.folder.path).events[-1], Adopted)
    held.lock.release()


def test_a_mistake_before_the_first_step_leaves_nothing(tmp_path: Path) -> None:
    start(tmp_path, 8, Planning(None), Failed("the job failed"))
    assert came_to_nothing(Mistake("no"), tmp_path / "run") and came_to_nothing(OverBudget("no"), tmp_path / "run")
    assert not came_to_nothing(RuntimeError("ours"), tmp_path / "run")
    (tmp_path / "run" / "plan-next.json").touch()  # memory ran out, and a plan with more room is ready
    assert not came_to_nothing(Mistake("no"), tmp_path / "run")
    (tmp_path / "run" / "moments.bin").touch()
    (tmp_path / "run" / "tensorboard").mkdir()
    (tmp_path / "run" / "tensorboard" / "events").touch()
    forget_attempt(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_the_user_keeps_in_the_folder_stays(tmp_path: Path) -> None:
    start(tmp_path, 8)
    (tmp_path / "run" / "notes.txt").write_text("mine")
    forget_attempt(tmp_path / "run")
    assert {one.name for one in (tmp_path / "run").iterdir()} == {"notes.txt", "lock"}


@pytest.mark.parametrize("steps", [0, 2])
def test_a_script_that_fails_before_its_first_step_leaves_no_run(steps: int, tmp_path: Path) -> None:
    done: list[Any] = []

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        done.append(None)
        return output.sum() if len(done) <= planned[0] + steps else output.nonsense  # type: ignore[attr-defined, no-any-return]

    planned = [1 << 30]
    job = Job(model=lambda: nn.Linear(8, 2), data=[torch.ones(4, 8)], loss=loss, steps=5)
    plan = shoestring.plan(job, use=[])
    planned[0] = len(done)
    with pytest.raises(AttributeError):
        list(shoestring.train(job, plan, run=tmp_path / "run"))
    assert (tmp_path / "run").exists() == bool(steps)


def test_a_job_that_can_not_be_made_leaves_nothing(tmp_path: Path) -> None:
    def resolve(flags: Any) -> Any:
        raise Mistake("job.py raised KeyError")

    with pytest.raises(Mistake, match="KeyError"):
        open_run(tmp_path / "run", Request(job="/my.py"), b"", False, False, resolve=resolve)
    assert not (tmp_path / "run").exists()


def test_a_file_in_place_of_the_checkpoints_is_told_as_what_it_is(tmp_path: Path) -> None:
    start(tmp_path, 8)
    (tmp_path / "run" / "checkpoints").write_text("")
    with pytest.raises(
        Mistake,
        match="run/checkpoints is a file, and a folder has to be there, for the run's checkpoints: move it away",
    ):
        asked(tmp_path, 8)
    (tmp_path / "run" / "checkpoints").unlink()
    os.symlink("nowhere", tmp_path / "run" / "checkpoints")
    with pytest.raises(Mistake, match="is a link that leads to no folder"):
        asked(tmp_path, 8)


def test_so_it_is_when_it_comes_while_training(tmp_path: Path) -> None:
    told: list[Event] = []
    (tmp_path / "checkpoints").write_text("")
    saver = Saver(tmp_path / "checkpoints", Cadence(), told.append)
    for save in (saver.save, saver.save_best):
        save(lambda: Snapshot(1, {"weight": torch.ones(2)}, {}, {}))
        assert isinstance(told[-1], Warned) and "checkpoints is a file, and a folder has to be there" in told[-1].text
        assert "move it away" in told[-1].text and "space" not in told[-1].text
    saver.close()
