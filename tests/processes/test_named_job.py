"""The job of a folder: what the caller is told where code is not what it was when the folder was made."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from shoestring.core.files.regular import file_sha256
from shoestring.processes.named_job import Claim, named_job

JOB = """
import torch, {module}
from shoestring import Job

def job() -> Job:
    return Job(model=lambda: torch.nn.Linear(2, 2), data=[torch.ones(2, 2)])
"""
COUNT = itertools.count()


@pytest.fixture
def claim(tmp_path: Path) -> Claim:
    """Of a run by train.py, which imports a module beside it."""
    module = tmp_path / f"helper_of_claim_{next(COUNT)}.py"
    module.write_text("SLOPE = 0.0\n")
    file = tmp_path / "train.py"
    file.write_text(JOB.format(module=module.stem))
    return Claim(tmp_path / "run", str(file), file_sha256(file), modules={module.name: file_sha256(module)})


def notes(claim: Claim, file: str | Path) -> list[str]:
    return named_job(claim, file, {})[1]


def test_a_changed_module_is_told_wherever_a_folder_is_opened(claim: Claim) -> None:
    assert notes(claim, claim.job) == []
    (module,) = claim.modules
    (Path(claim.job).parent / module).write_text("SLOPE = 0.1\n")
    (told,) = notes(claim, claim.job)
    assert told.startswith(f"the module {module} is not as it was when {claim.folder} was made")


def test_a_changed_job_and_another_job_are_told_apart(claim: Claim) -> None:
    file = Path(claim.job)
    other = file.with_name("other.py")
    other.write_text(file.read_text() + "# another\n")
    assert f"{other} is not the job that {claim.folder} was made with ({file})" in notes(claim, other)[0]
    file.write_text(other.read_text())
    assert f"{file} is not as it was when {claim.folder} was made" in notes(claim, file)[0]
