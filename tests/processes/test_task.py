"""A task as it is written and read: its room and its kind are looked up, and nothing that it names is imported."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from shoestring.core.errors import Crashed, Mistake
from shoestring.core.files.codec import to_json
from shoestring.core.rooms import installed_rooms
from shoestring.processes.messages import Closing
from shoestring.processes.task import GroupHistory, GroupSeat, read_task, task_text
from shoestring.training.evidence.tasks import TechniqueSpec, TrialTask
from shoestring.training.execution.recorder import RecordingSettings
from shoestring.training.execution.tasks import DoctorTask, TrainResult, TrainTask


def test_a_task_is_read_as_it_was_written() -> None:
    for task in (
        DoctorTask(),
        TrainTask(file="a.py", techniques=(TechniqueSpec("Checkpoint", {"every": 2}),), steps=3),
    ):
        assert read_task(task_text(task)) == task


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"room": "doctors"}, "no room 'doctors' is installed"),
        ({"room": "payload"}, "no room 'payload' is installed"),
        ({"room": "payload:ROOM"}, "no room 'payload:ROOM' is installed"),
        ({"task": "payload"}, "no task"),
        ({"task": "payload.Task"}, "no task"),
        ({"room": ["training"]}, "no task"),
        ({"stpes": 3}, "no task"),
    ],
)
def test_what_a_task_names_is_looked_up_and_never_imported(
    changed: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "payload.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    written = json.dumps(json.loads(task_text(DoctorTask())) | changed)
    with pytest.raises(Mistake, match=said):
        read_task(written)
    assert "payload" not in sys.modules


def test_every_task_of_every_room_is_in_its_room_s_table_under_its_kind() -> None:
    for room in installed_rooms():
        for kind, task in room.tasks().items():
            assert (task.room, task.kind) == (room.name, kind) and not task.__abstractmethods__


def test_training_can_be_stopped_and_tells_of_its_group_and_a_trial_can_not() -> None:
    train = TrainTask(file="a.py", recording=RecordingSettings("run"))
    assert (train.run_folder, TrainTask(file="a.py").run_folder) == ("run", "")
    assert train.stop_result(7).stopped == 7
    grouped = train.in_group(TrainResult(steps=3), GroupHistory(4, 1, (2.0,)))
    assert (grouped.steps, grouped.world, grouped.restarts, grouped.recovery_seconds) == (3, 4, 1, (2.0,))
    assert train.closing(TrainResult(unsaved="full", stopped=2)) == Closing("full", 2)
    with pytest.raises(Crashed, match="a trial is nothing that can be stopped"):
        TrialTask(file="a.py").stop_result(1)
    with pytest.raises(Crashed, match="a doctor is nothing that a group can do"):
        DoctorTask().join(GroupSeat(0, 2, True, 1.0))
    assert to_json(DoctorTask()) == {}
