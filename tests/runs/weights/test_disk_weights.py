"""Runs whose state is on disk: exported, refused under another plan, checked when it is read, and trained where nothing else fits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shoestring.core.errors import Mistake
from shoestring.core.technique import technique_json
from shoestring.jobfile import load_job
from shoestring.processes.launch import run_worker
from shoestring.runs.checkpoints.checkpoints import newest_good
from shoestring.runs.reports.export import export_weights
from shoestring.runs.weights.tensors import TensorFile
from shoestring.training.evidence.rehearse import rehearse
from shoestring.training.execution.tasks import TrainResult
from shoestring.training.memory.offload.offload_model import OffloadModel
from shoestring.training.memory.offload.offload_optimizer import OffloadOptimizer
from shoestring.training.planning.plan import training_plan
from shoestring.training.technique import TrainingTechnique as Technique
from tests.records import records
from tests.tasks import train_task

pytestmark = pytest.mark.usefixtures("warm_workers")

JOB = """
import torch
from torch import nn
from shoestring import Job

def data():
    draw = torch.Generator().manual_seed(0)
    while True:
        x = torch.randn(8, 130, generator=draw)
        yield x, x[:, :10].argmax(1)

def job(steps: int = 4) -> Job:
    block = lambda: nn.Sequential(nn.Linear(130, 130), nn.GELU())
    return Job(model=lambda: nn.Sequential(*(block() for _ in range(5)), nn.Linear(130, 10)), data=data, steps=steps)
"""
STREAM = {"name": "OffloadModel", "knobs": {}}
OFFLOAD = {"name": "OffloadOptimizer", "knobs": {}}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("job") / "job.py"
    path.write_text(JOB)
    return path


def trained(job: Path, folder: Path, *techniques: dict[str, Any], steps: int = 4, weights: str = "") -> TrainResult:
    folder.mkdir(exist_ok=True)
    return run_worker(train_task(job, steps, techniques, folder, {"steps": 2}, weights=weights), {})


def test_the_weights_of_a_streamed_run_are_exported(job: Path, tmp_path: Path) -> None:
    plain = trained(job, tmp_path / "plain", weights=str(tmp_path / "plain.safetensors"))
    streamed = trained(job, tmp_path / "run", STREAM)
    assert streamed.weights_sha256 == plain.weights_sha256 and streamed.measured["traffic_bytes"] > 0
    checkpoint, damaged = newest_good(tmp_path / "run" / "checkpoints")
    assert checkpoint is not None and not damaged and len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1
    export_weights(checkpoint, tmp_path / "out.safetensors")
    out, expected = TensorFile(tmp_path / "out.safetensors"), TensorFile(tmp_path / "plain.safetensors")
    assert set(out) == set(expected) and all(torch.equal(out[name], expected[name]) for name in expected)


@pytest.mark.parametrize("technique", [STREAM, pytest.param(OFFLOAD, marks=pytest.mark.slow)])
def test_it_goes_on_with_the_same_bits_and_not_under_another_plan(
    technique: dict[str, Any], job: Path, tmp_path: Path
) -> None:
    whole = trained(job, tmp_path / "whole", technique, steps=6)
    trained(job, tmp_path / "run", technique)
    with pytest.raises(Mistake, match="made by another plan"):
        trained(job, tmp_path / "run", steps=6)
    assert trained(job, tmp_path / "run", technique, steps=6).weights_sha256 == whole.weights_sha256


@pytest.mark.parametrize("technique", [OffloadModel(), OffloadOptimizer()])
def test_the_rehearsal_knows_how_much_the_disk_will_hold(technique: Technique, job: Path, tmp_path: Path) -> None:
    trained(job, tmp_path / "run", technique_json(technique))
    (file,) = (tmp_path / "run").glob("*.bin")
    assert rehearse(load_job(job, {}), (technique,)).stored == file.stat().st_size


def test_a_plan_for_a_larger_disk_is_refused_before_anything_is_made(job: Path, tmp_path: Path) -> None:
    training_plan((OffloadModel(),), stored_bytes=1 << 60).save(tmp_path / "plan.json")
    child = subprocess.run(
        [
            sys.executable,
            "-m",
            "shoestring",
            "train",
            str(job),
            "--plan",
            str(tmp_path / "plan.json"),
            "--run",
            str(tmp_path / "run"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        child.returncode == 2 and "the state needs 1,073,741,824 GiB" in child.stderr and "are free" in child.stderr
    ), child.stderr
    assert not list((tmp_path / "run").glob("*.bin"))


@pytest.mark.parametrize(
    ("technique", "name"), [(STREAM, "stream.bin"), pytest.param(OFFLOAD, "moments.bin", marks=pytest.mark.slow)]
)
def test_bits_that_flipped_while_nothing_ran_are_told_of_and_the_same_command_begins_anew(
    technique: dict[str, Any], name: str, job: Path, tmp_path: Path
) -> None:
    undisturbed = trained(job, tmp_path / "run", technique, steps=6).weights_sha256
    path = tmp_path / "run" / name
    held = bytearray(path.read_bytes())
    for offset in range(100, len(held), 4096):  # in both slots of every region
        held[offset] ^= 1
    path.write_bytes(held)
    with pytest.raises(
        Mistake,
        match=rf"{name} is not what was written there.*kept aside as .*{name}.damaged-0.*same command begins anew",
    ):
        trained(job, tmp_path / "run", technique, steps=8)
    again = trained(job, tmp_path / "run", technique, steps=6)
    assert again.weights_sha256 == undisturbed and again.steps == 6
    warning = next(
        event["text"]
        for event in records(tmp_path / "run")
        if event["event"] == "warning" and "damaged" in event["text"]
    )
    assert (
        f"{name}, in which its state lies, is not there any more" in warning and "goes on from the beginning" in warning
    )
    assert (tmp_path / "run" / f"{name}.damaged-0").read_bytes() == held
    assert [one.name for one in (tmp_path / "run" / "checkpoints").iterdir() if "damaged" in one.name] == [
        "step-00000006.damaged-0"
    ]


@pytest.mark.slow
def test_a_model_that_fits_in_no_other_way_is_made_planned_and_trained_under_a_limit(tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-m",
        "shoestring",
        "train",
        "gpt",
        "--width",
        "768",
        "--depth",
        "20",
        "--heads",
        "8",
        "--batch",
        "1",
        "--steps",
        "2",
        "--run",
        str(tmp_path / "run"),
        "--json",
    ]
    child = subprocess.run(
        ["sh", "-c", 'ulimit -v 1500000; exec "$@"', "sh", *words], capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr
    report = json.loads(child.stdout)
    assert "OffloadModel" in [one["name"] for one in report["techniques"]]
    assert report["predicted"]["peak_bytes"] == report["measured"]["peak_bytes"]
    assert report["predicted"]["traffic_bytes"] == report["measured"]["traffic_bytes"]
    assert abs(report["predicted"]["process_bytes"] / report["measured"]["process_bytes"] - 1) <= 0.06
