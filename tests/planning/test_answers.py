"""What was measured of a job is not measured again: while nothing changed that can be known, and never silently."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from shoestring.core.costs.hardware import Hardware
from shoestring.core.errors import OverBudget
from shoestring.core.files.codec import to_json
from shoestring.jobfile import load_job
from shoestring.measure.tracker import Log, StorageEvent
from shoestring.planning import answers as kept_evidence
from shoestring.planning.answers import DRIFTED, MeasuredAnswers, digest, open_answers, own_modules
from shoestring.training import library as api
from shoestring.training.evidence.tasks import TrialResult, TrialTask
from shoestring.training.execution import job_planning
from shoestring.training.execution.job_key import about_job
from shoestring.training.report.outcome_text import training_outcome_text

pytestmark = pytest.mark.usefixtures("warm_workers", "home")

JOB = """
import torch
from layers_of_mine import layer
from shoestring import Job

def job(width: int = 16, text: str = "") -> Job:
    return Job(model=lambda: torch.nn.Sequential(layer(width), torch.nn.Linear(width, 4)),
               data=lambda: [(torch.zeros(8, width), torch.zeros(8, dtype=torch.long))] * 4)
"""
LAYERS = "from torch import nn\n\ndef layer(width):\n    return nn.Sequential(nn.Linear(width, width), nn.Tanh())\n"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a machine that is as fast each time and never busy."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(kept_evidence, "HELD_UP", 1.0)
    monkeypatch.setattr(job_planning, "known_hardware", lambda dtypes=False: Hardware())
    return tmp_path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    sys.modules.pop("layers_of_mine", None)
    (tmp_path / "layers_of_mine.py").write_text(LAYERS)
    (tmp_path / "job.py").write_text(JOB)
    return tmp_path / "job.py"


def never() -> Any:
    raise AssertionError("it is known")


def log(size: int) -> Log:
    return Log(events=[StorageEvent(1, size)], traits={"complex weights"})


def kept(about: Mapping[str, Any] | None = None, speed: float = 1.0, fresh: bool = False) -> MeasuredAnswers:
    return open_answers(about or {"job": 1}, speed, fresh)


def filled() -> MeasuredAnswers:
    first = kept()
    assert first.answer({"log": 1}, Log, lambda: log(7)) == log(7)
    first.save()
    return first


def test_an_answer_is_kept_for_the_same_question_about_the_same_job() -> None:
    first, again = filled(), kept()
    assert again.answer({"log": 1}, Log, never) == log(7) and again.used and again.when == first.when > 0
    assert again.answer({"log": 2}, Log, lambda: log(8)) == log(8)
    other = kept({"job": 2})
    assert other.answer({"log": 1}, Log, lambda: log(9)) == log(9) and not other.used
    assert (
        not kept(fresh=True).answers
        and not kept(speed=DRIFTED * 1.01).answers
        and not kept(speed=0.99 / DRIFTED).answers
    )


def test_a_trial_that_is_made_twice_in_a_planning_has_two_results_and_the_next_planning_gets_both() -> None:
    def results(kept: MeasuredAnswers, *found: int) -> list[int]:
        left = iter(found)
        task = TrialTask(file="job.py")
        return [
            kept.by_worker(
                {"task": task.kind} | to_json(task), task.result, lambda: TrialResult(next(left), 1.0, 4)
            ).process_bytes
            for _ in range(2)
        ]

    first = kept()
    assert results(first, 5, 6) == [5, 6]
    first.save()
    assert results(kept()) == [5, 6]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-9],
        lambda data: data.replace(b'"speed": 1', b'"speed": 2'),
        lambda data: b"[]",
        lambda data: b"",
        lambda data: data.replace(b'"answers": "', b'"answers": "!'),
    ],
)
def test_a_damaged_file_counts_as_not_there(damage: Any) -> None:
    place = filled().place
    place.write_bytes(damage(place.read_bytes()))
    assert not kept().answers


def test_a_file_of_other_shape_and_an_answer_of_another_kind_are_measured_again() -> None:
    from shoestring.measure.cache import write_cached

    place = filled().place
    write_cached(place, {"version": 1, "when": "never", "speed": {}, "files": 3, "answers": 4})
    assert not kept().answers
    odd = kept()
    odd.answers[digest({"log": 1})] = {"events": 3}
    assert odd.answer({"log": 1}, Log, lambda: log(5)) == log(5)


def test_who_was_killed_while_writing_leaves_nothing_in_the_way() -> None:
    place = filled().place
    draft = place.with_name(f"{place.name}.tmp-999999")
    draft.write_bytes(b"{")
    again = kept()
    again.answer({"log": 2}, Log, lambda: log(8))
    again.save()
    assert len(kept().answers) == 2 and not draft.exists()


def write_often(number: int) -> None:
    for size in range(20):
        one = open_answers({"job": 1}, 1.0, fresh=True)
        one.answer({"log": 1}, Log, lambda size=size: log(100 * number + size))  # type: ignore[misc]
        one.save()


def test_two_that_plan_at_once_leave_a_whole_file() -> None:
    filled()
    writers = [get_context("fork").Process(target=write_often, args=(number,)) for number in (1, 2)]
    for one in writers:
        one.start()
    for _ in range(50):
        assert len(kept().answers) == 1, "whoever wrote last, it is whole"
    for one in writers:
        one.join()
    assert [one.exitcode for one in writers] == [0, 0]


def test_a_module_of_the_users_that_changed_makes_what_was_measured_with_it_void(file: Path) -> None:
    load_job(str(file), {})
    mine = file.parent / "layers_of_mine.py"
    assert str(mine) in own_modules() and not any(
        "site-packages" in one or "shoestring/core" in one for one in own_modules()
    )
    filled()
    assert kept().answers
    mine.write_text(LAYERS.replace("Tanh", "ReLU"))
    assert not kept().answers
    mine.unlink()
    assert not kept().answers


def test_a_job_is_known_by_its_source_flags_files_batches_software_and_machine(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = file.parent / "text.txt"
    data.write_text("one")

    def place(machine: Hardware = Hardware(), workers: int = 1, **flags: Any) -> str:
        return digest(about_job(load_job(str(file), flags), machine, workers, workers))

    before = place()
    assert place() == before
    with_text = place(text=str(data))
    found = {before, with_text, place(width=8), place(workers=2), place(Hardware(cores=7))}
    data.write_text("another")
    found.add(place(text=str(data)))
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    found.add(place())
    monkeypatch.delenv("MALLOC_ARENA_MAX")
    file.write_text(JOB.replace("torch.zeros(8, width)", "torch.zeros(8, width).double()"))
    found.add(place())
    file.write_text(JOB + "# the same but for a remark\n")
    found.add(place())
    monkeypatch.chdir(file.parent)
    found.add(place())
    assert len(found) == 10, "each of these may change what is measured"


def test_a_job_is_planned_again_without_measuring_and_the_plan_says_so(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    first = api.plan(file, memory="8GiB", tell=told.append)
    assert not first.measured_at and "measured earlier" not in training_outcome_text(first)
    assert (
        told[:2] == ["looking for the largest batch", "rehearsing plain on fake tensors"]
        and "measuring a real step" in told
    )
    real = job_planning.run_worker
    monkeypatch.setattr(job_planning, "run_worker", lambda *given: never())
    quiet: list[str] = []
    again = api.plan(file, memory="8GiB", tell=quiet.append)
    assert again.chosen == first.chosen and again.plain == first.plain and again.measured_at > 0
    assert not quiet, "nothing takes time"
    assert "measured earlier, at 20" in (text := training_outcome_text(again)) and "--fresh-plan measures again" in text
    assert json.loads(json.dumps(again.as_json()))["measured_at"] == again.measured_at
    monkeypatch.setattr(job_planning, "run_worker", real)
    with pytest.raises(OverBudget, match=r"nothing fits 1\.00 MiB"):
        api.plan(file, memory="1MiB")
    assert not api.plan(file, fresh_plan=True).measured_at


def test_what_is_planned_for_named_techniques_measures_no_more_than_they_need(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []
    real = job_planning.run_worker

    def noted(task: Any, environment: Mapping[str, str]) -> Any:
        done.append((task.kind, getattr(task, "memory", None), getattr(task, "pieces", None)))
        return real(task, environment)

    monkeypatch.setattr(job_planning, "run_worker", noted)
    api.plan(file, use=["Checkpoint(every=1)"])
    assert done == [("anchor", False, False), ("trial", None, None)]
    done.clear()
    api.plan(file, use=["Accumulate(pieces=2)", "Allocator(kind='huge')"], width=8)
    assert done == [("anchor", False, True), ("anchor", True, True)]


def test_a_job_without_a_file_is_measured_each_time(file: Path) -> None:
    from dataclasses import replace

    job = replace(load_job(str(file), {}), origin=None)
    assert not api.plan(job).measured_at and not api.plan(job).measured_at
    assert not (Path(os.environ["HOME"]) / ".cache" / "shoestring" / "evidence").exists()
