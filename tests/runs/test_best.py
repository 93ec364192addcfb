"""Validation in a run: killed wherever it may be, it finds the same metrics, the same best weights and the same end; and they are kept."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from shoestring.core.errors import Crashed, Mistake
from shoestring.core.technique import technique_from
from shoestring.jobfile import load_job
from shoestring.measure.timeline import peak
from shoestring.measure.tracker import VALIDATE
from shoestring.processes.launch import run_worker
from shoestring.runs.checkpoints.checkpoints import BEST, damage, list_checkpoints
from shoestring.runs.events.event import Begun, Event, Saved, Stepped, Validated, Warned
from shoestring.runs.events.history import metrics_of
from shoestring.runs.folder import Folder
from shoestring.runs.reports.export import best_weights, export_steps, export_weights
from shoestring.runs.reports.report import report_of
from shoestring.runs.reports.report_json import best_json
from shoestring.runs.weights.tensors import TensorFile
from shoestring.training.catalogue import CATALOGUE
from shoestring.training.evidence.rehearse import rehearse
from shoestring.training.execution.tasks import TrainTask
from tests.tasks import train_task

pytestmark = pytest.mark.usefixtures("warm_workers")

JOB = """
import os, signal
import torch
from torch import nn
from shoestring import Job

def batches(seed, count, rows):
    chance = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.randn(rows, 64, generator=chance)
        yield x, x[:, :10].argmax(1)

def metrics(flag):
    def found(output, batch):
        if flag and not os.path.exists(flag) and os.path.exists(flag + " armed"):
            open(flag, "w")
            os.kill(os.getpid(), signal.SIGKILL)
        return {"accuracy": (output.argmax(1) == batch[1]).float().mean()}
    return found

def job(goal: str = "max loss", patience: int = 2, flag: str = "", every: str = "4", listed: bool = False) -> Job:
    block = lambda: nn.Sequential(nn.Linear(64, 260), nn.GELU(), nn.Dropout(0.2), nn.Linear(260, 64))
    return Job(model=lambda: nn.Sequential(*(block() for _ in range(5)), nn.Linear(64, 10)), steps=24,
               data=lambda: (list if listed else iter)(batches(0, 100, 16)),
               optimizer=lambda p: torch.optim.AdamW(p, lr=4e-3),
               held_out=lambda: batches(1, 3, 512), metrics=metrics(flag), every=every, goal=goal, patience=patience)
"""
PLANS = {
    "plain": [],
    "recomputed": [{"name": "Checkpoint", "knobs": {"every": 2}}],
    "streamed": [{"name": "OffloadModel", "knobs": {}}],
}


class Outcome(NamedTuple):
    weights: str
    metrics: list[dict[str, Any]]
    best: dict[str, Any] | None
    ended: str
    best_weights: dict[str, float]  # sums by name


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("job") / "job.py"
    path.write_text(JOB)
    return path


def task(job: Path, folder: Path, plan: str, **flags: Any) -> TrainTask:
    folder.mkdir(exist_ok=True)
    return train_task(job, 24, PLANS[plan], folder, {"steps": 3, "keep": 2}, flags)


def outcome(folder: Path, weights: str) -> Outcome:
    told = report_of(folder)
    found = best_weights(Folder(folder)).all_weights()
    return Outcome(
        weights,
        metrics_of(told.validated),
        best_json(told),
        told.why_ended,
        {name: float(sum(piece.double().sum() for piece in one.pieces())) for name, one in found.items()},
    )


def trained(
    job: Path, folder: Path, plan: str, look: Callable[[Event], None] = lambda event: None, **flags: Any
) -> Outcome:
    return outcome(folder, run_worker(task(job, folder, plan, **flags), {}, look).weights_sha256)


@pytest.fixture(scope="module")
def undisturbed(job: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return trained(job, tmp_path_factory.mktemp("run"), "plain")


def test_a_run_that_gets_no_better_ends_and_its_best_weights_are_kept(undisturbed: Outcome) -> None:
    assert undisturbed.ended == "no better for 2 validations"
    steps = [one["step"] for one in undisturbed.metrics]
    assert 12 <= steps[-1] < 24 and steps == list(range(4, steps[-1] + 1, 4))
    assert undisturbed.best == undisturbed.metrics[-3] == max(undisturbed.metrics, key=lambda one: float(one["loss"]))


@pytest.mark.parametrize("plan", ["plain", "streamed"])
@pytest.mark.parametrize("moment", ["in a validation", "after it", "when the best is saved"])
def test_killed_around_a_validation_all_is_the_same(
    moment: str, plan: str, job: Path, tmp_path: Path, undisturbed: Outcome
) -> None:
    pid, flag = 0, str(tmp_path / "killed")

    def look(event: Event) -> None:
        nonlocal pid
        pid = event.pid if isinstance(event, Begun) else pid
        if moment == "in a validation" and isinstance(event, Stepped) and event.step == 7:
            Path(flag + " armed").touch()
        if (moment == "after it" and isinstance(event, Validated) and event.step == 8) or (
            moment == "when the best is saved" and isinstance(event, Saved) and event.best
        ):
            os.kill(pid, signal.SIGKILL)

    with pytest.raises(Crashed, match="SIGKILL"):
        trained(job, tmp_path / "run", plan, look, flag=flag)
    assert trained(job, tmp_path / "run", plan, flag=flag) == undisturbed


def test_stopped_where_a_validation_is_due_it_is_done_when_the_run_goes_on(
    job: Path, tmp_path: Path, undisturbed: Outcome
) -> None:
    pid = 0

    def look(event: Event) -> None:
        nonlocal pid
        pid = event.pid if isinstance(event, Begun) else pid
        if isinstance(event, Stepped) and event.step == 7:
            os.kill(pid, signal.SIGTERM)

    result = run_worker(task(job, tmp_path / "run", "plain"), {}, look)
    assert result.stopped is not None
    assert trained(job, tmp_path / "run", "plain") == undisturbed


def test_a_finished_run_is_not_trained_on(job: Path, tmp_path: Path, undisturbed: Outcome) -> None:
    trained(job, tmp_path, "plain")
    told: list[Event] = []
    assert trained(job, tmp_path, "plain", told.append) == undisturbed
    assert not any(isinstance(event, (Stepped, Validated)) for event in told)


@pytest.mark.parametrize(("plan", "listed"), [*((plan, False) for plan in PLANS), ("plain", True)])
def test_what_a_validation_needs_is_predicted_to_the_byte_and_measured(
    plan: str, listed: bool, job: Path, tmp_path: Path
) -> None:
    result = run_worker(task(job, tmp_path, plan, listed=listed), {})
    techniques = tuple(technique_from(one["name"], one["knobs"], CATALOGUE) for one in PLANS[plan])
    highest = peak(rehearse(load_job(job, {"listed": listed}), techniques))
    assert highest.moment.phase == VALIDATE
    assert result.measured["peak_bytes"] == highest.bytes and result.measured["validation_seconds"] > 0


def test_better_weights_take_the_place_of_those_before(job: Path, tmp_path: Path) -> None:
    told: list[Event] = []
    found = trained(job, tmp_path, "plain", told.append, goal="min loss", patience=0)
    assert found.ended == "steps" and len(found.metrics) == 6 and found.best is not None
    better = [event.step for event in told if isinstance(event, Validated) and event.best]
    assert (
        len(better) > 1
        and [event.step for event in told if isinstance(event, Saved) and event.checkpoint.startswith(BEST)] == better
    )
    assert (
        len(list_checkpoints(tmp_path / "checkpoints", BEST)) < len(better)
        and list_checkpoints(tmp_path / "checkpoints", BEST)[-1].step == better[-1]
    )
    if better[-1] == 24:  # they are those that it ended with
        export_weights(best_weights(Folder(tmp_path)), tmp_path / "best.safetensors")
        last = list_checkpoints(tmp_path / "checkpoints")[-1].weights()
        assert all(torch.equal(value, last[name]) for name, value in TensorFile(tmp_path / "best.safetensors").items())


def test_flipped_bits_in_the_best_weights_are_found(job: Path, tmp_path: Path) -> None:
    trained(job, tmp_path, "plain")
    best = list_checkpoints(tmp_path / "checkpoints", BEST)[-1]
    file = best.path / "weights.safetensors"
    whole = bytearray(file.read_bytes())
    whole[len(whole) // 2] ^= 1
    file.write_bytes(whole)
    assert damage(best)
    with pytest.raises(Mistake, match=f"best weights, of step {best.step}, are damaged"):
        best_weights(Folder(tmp_path))
    for path in best.path.iterdir():
        path.unlink()
    best.path.rmdir()
    with pytest.raises(Mistake, match=f"was after step {best.step}, whose weights are not there"):
        best_weights(Folder(tmp_path))


def test_the_course_as_csv_has_metrics_where_there_was_a_validation(
    job: Path, tmp_path: Path, undisturbed: Outcome
) -> None:
    trained(job, tmp_path, "plain")
    lines = export_steps(Folder(tmp_path), "csv", tmp_path / "a.csv")[0].read_text().splitlines()
    assert lines[0] == "step,loss,seconds,process_bytes,validation loss,validation accuracy"
    assert lines[3].endswith(",,") and lines[4].endswith(
        f",{undisturbed.metrics[0]['loss']!r},{undisturbed.metrics[0]['accuracy']!r}"
    )
    export_steps(Folder(tmp_path), "json", tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text())["best"] == undisturbed.best


def test_a_goal_that_is_not_measured_ends_the_run_and_keeps_what_was_trained(job: Path, tmp_path: Path) -> None:
    with pytest.raises(Mistake, match="validation gave loss, accuracy"):
        trained(job, tmp_path, "plain", goal="max f1", patience=0)
    assert list_checkpoints(tmp_path / "checkpoints")[-1].step == 4


def test_a_validation_by_the_clock_says_that_runs_differ(job: Path, tmp_path: Path) -> None:
    told: list[Event] = []
    trained(job, tmp_path, "plain", told.append, every="1h", patience=0)
    assert ["by the clock" in event.text for event in told if isinstance(event, Warned)] == [True]
