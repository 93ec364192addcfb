from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shoestring.core.errors import Mistake
from shoestring.core.files.codec import to_json
from shoestring.core.files.seal import seal, unseal
from shoestring.federated.tasks.compare import Comparison
from shoestring.federated.tasks.evaluate import Evaluation
from shoestring.federated.tasks.perform import perform_task
from shoestring.federated.tasks.settings import TuneCandidate, candidates_of, settings_of
from shoestring.federated.tasks.task import (
    FILE,
    FederatedTask,
    attach,
    check_code,
    code_of,
    read_models,
    read_task,
    read_weights,
    write_task,
)
from shoestring.federated.tasks.tune import Tuning
from tests.federated.tasks.toy import cohort_of, names_of
from tests.mutations import variants


def task_in(folder: Path) -> FederatedTask:
    (folder / "job.py").write_text("def job(): ...")
    models = attach("", torch.zeros(1), folder), attach("far", torch.tensor([0.5]), folder)
    return FederatedTask(
        "tune",
        code_of(folder / "job.py", {"width": 4}),
        models,
        candidates_of(settings_of("lr=0.1,0.5")),
        seed=7,
        edges={"loss": (0.5, 1.0)},
        parameters={"halving": True},
    )


def test_a_task_is_read_as_it_was_written_with_its_models(tmp_path: Path) -> None:
    task = task_in(tmp_path)
    write_task(task, tmp_path)
    assert read_task(tmp_path) == task
    assert {name: row.tolist() for name, row in read_models(task, tmp_path).items()} == {"": [0.0], "far": [0.5]}


def test_a_changed_task_model_or_job_file_is_refused(tmp_path: Path) -> None:
    task = task_in(tmp_path)
    file = write_task(task, tmp_path)
    check_code(task.code, tmp_path / "job.py")
    (tmp_path / "job.py").write_text("def job(): pass")
    with pytest.raises(Mistake, match="not the job file of the task"):
        check_code(task.code, tmp_path / "job.py")
    file.write_bytes(file.read_bytes().replace(b'"seed": 7', b'"seed": 8'))
    with pytest.raises(Mistake, match="SHA-256"):
        read_task(tmp_path)
    (tmp_path / task.models[1].path).write_bytes(torch.tensor([0.6]).numpy().tobytes())
    with pytest.raises(Mistake, match="'far' is not what was attached"):
        read_models(task, tmp_path)
    (tmp_path / task.models[1].path).unlink()
    with pytest.raises(Mistake, match="missing"):
        read_models(task, tmp_path)
    (tmp_path / FILE).unlink()
    with pytest.raises(Mistake, match="no task in"):
        read_task(tmp_path)


def test_a_model_outside_of_the_tasks_folder_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    task = task_in(tmp_path / "inside")
    outside = replace(task.models[0], path="../secret")
    (tmp_path / "secret").write_bytes(b"1234")
    with pytest.raises(Mistake, match="outside"):
        read_models(replace(task, models=(outside,), candidates=(TuneCandidate("x"),)), tmp_path / "inside")


def test_a_resealed_task_is_used_or_refused_in_a_sentence(tmp_path: Path) -> None:
    file = write_task(task_in(tmp_path), tmp_path)
    whole, _ = unseal(file.read_bytes())
    for one in variants(whole, 10):
        if isinstance(one, dict):
            file.write_bytes(seal(one))
            with suppress(Mistake):
                read_models(read_task(tmp_path), tmp_path)


def test_pipes_and_weights_of_half_a_number_are_refused(tmp_path: Path) -> None:
    task = task_in(tmp_path)
    odd = replace(task.models[0], path="odd", sha256=hashlib.sha256(b"odd").hexdigest())
    (tmp_path / "odd").write_bytes(b"odd")
    os.mkfifo(tmp_path / "pipe")
    for model, told in ((odd, "not what was attached"), (replace(odd, path="pipe"), "is a pipe")):
        with pytest.raises(Mistake, match=told):
            read_weights(model, tmp_path)
    os.mkfifo(tmp_path / FILE)
    with pytest.raises(Mistake, match="is a pipe"):
        read_task(tmp_path)


def test_what_makes_no_task_is_refused(tmp_path: Path) -> None:
    task = task_in(tmp_path)
    for change, told in (
        ({"kind": "evalute"}, "did you mean evaluate"),
        ({"kind": "compare", "candidates": ()}, "give two"),
        ({"candidates": ()}, "without candidates"),
        ({"by": "rows"}, "devices"),
        ({"goal": "loss"}, "goal="),
        ({"candidates": (TuneCandidate("x", model="no"),)}, "of the model 'no'"),
    ):
        with pytest.raises(Mistake, match=told):
            replace(task, **change)  # type: ignore[arg-type]


def test_every_kind_is_performed_and_training_is_left_to_rounds(tmp_path: Path) -> None:
    task, names = task_in(tmp_path), names_of(40)
    cohort = replace(cohort_of(), models=read_models(task, tmp_path))
    assert isinstance(tuned := perform_task(task, cohort, names), Tuning) and tuned.best.candidate.name == "lr=0.5"
    assert isinstance(perform_task(replace(task, kind="evaluate"), cohort, names), Evaluation)
    assert isinstance(perform_task(replace(task, kind="compare"), cohort, names), Comparison)
    with pytest.raises(Mistake, match="rounds"):
        perform_task(replace(task, kind="train"), cohort, names)
    assert to_json(tuned) == tuned.as_json()
