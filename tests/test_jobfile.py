"""Flags of a job file are read from its source."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shoestring import Mistake
from shoestring.jobfile import flags_of, job_path, load_job, parse_flags

SOURCE = "def job(width: int = 4, rate: float = 0.1, name: str = 'a', fast: bool = False, *, some_more=3): return 1\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    return file


def test_flags_have_the_types_and_defaults_of_the_arguments(path: Path) -> None:
    assert [(flag.name, flag.kind, flag.default) for flag in flags_of(path)] == [
        ("width", "int", 4),
        ("rate", "float", 0.1),
        ("name", "str", "a"),
        ("fast", "bool", False),
        ("some_more", "int", 3),
    ]


def test_values_are_parsed_in_every_way_people_write_them(path: Path) -> None:
    words = ["--width", "8", "--rate=1e-3", "--fast", "--some-more", "5"]
    assert parse_flags(path, words) == {"width": 8, "rate": 1e-3, "fast": True, "some_more": 5}
    assert parse_flags(path, ["--no-fast", "--name", "b c"]) == {"fast": False, "name": "b c"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--width"], "needs a value"),
        (["--width", "x"], "whole number"),
        (["extra"], "no option"),
        (["--fast=maybe"], "true or false"),
    ],
)
def test_a_wrong_flag_is_told(path: Path, words: list[str], said: str) -> None:
    with pytest.raises(Mistake, match=said):
        parse_flags(path, words)


def test_a_file_without_a_job_or_with_another_result_is_told(path: Path, tmp_path: Path) -> None:
    with pytest.raises(Mistake, match="gave int, not a Job"):
        load_job(path, {})
    empty = tmp_path / "empty.py"
    empty.write_text("x = 1\n")
    with pytest.raises(Mistake, match="no function `job`"):
        flags_of(empty)


JOB = """
from torch import nn
from shoestring import Job

def job(ARGUMENTS) -> Job:
    return Job(model=lambda: nn.Linear(1, 1), data=lambda: [], SETTINGS)
"""


@pytest.mark.parametrize(
    ("arguments", "settings", "words", "found"),
    [
        ("", "steps=7, epochs=2", [], (7, 2, 0)),
        ("", "steps=7, epochs=2", ["--steps", "5"], (5, 0, 0)),
        ("", "steps=7, epochs=2", ["--epochs", "5", "--seed", "3"], (0, 5, 3)),
        ("", "steps=7, epochs=2", ["--epochs", "5", "--steps=3"], (3, 5, 0)),
        ("steps: int = 7", "steps=2 * steps", ["--steps", "5"], (10, 0, 0)),
        ("steps: int = 7", "steps=2 * steps", ["--epochs", "5"], (0, 5, 0)),
        ("steps: int = 7", "steps=2 * steps", ["--epochs", "5", "--steps", "4"], (8, 5, 0)),
    ],
)
def test_steps_epochs_and_seed_are_flags_of_every_job(
    tmp_path: Path, arguments: str, settings: str, words: list[str], found: tuple[int, int, int]
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(JOB.replace("ARGUMENTS", arguments).replace("SETTINGS", settings))
    flags = parse_flags(path, words)
    job = load_job(path, flags)
    assert (job.steps, job.epochs, job.seed) == found
    assert job.origin is not None and dict(job.origin.flags) == flags, "another process makes the same job of them"
    assert load_job(path, dict(job.origin.flags)).steps == job.steps


@pytest.mark.parametrize(
    ("written", "said"), [("b", "needs a type"), ("b=None", "needs a type"), ("b: list = 3", "has the type list")]
)
def test_an_argument_that_is_no_flag_is_told(tmp_path: Path, written: str, said: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"def job({written}): ...")
    with pytest.raises(Mistake, match=f"the argument 'b' of job {said}"):
        flags_of(path)


@pytest.mark.parametrize("ours", [True, False])
def test_only_a_users_job_file_brings_its_folder_to_the_path(
    ours: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules of ours, such as losses.py beside the job of `distill`, would hide the user's of the same name."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine.py").write_text(
        "from torch import nn\nfrom shoestring import Job\ndef job() -> Job: return Job(model=lambda: nn.Linear(2, 2), data=[])\n"
    )
    before, file = list(sys.path), job_path("gpt") if ours else str(tmp_path / "mine.py")
    load_job(file, {})
    assert [one for one in sys.path if one not in before] == ([] if ours else [str(tmp_path)])
