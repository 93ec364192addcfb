"""The library as a script or a notebook meets it: names, docstrings, what is printed, and messages that speak of arguments."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoestring
from shoestring import Job, Mistake, OverBudget
from shoestring.core.budget import Budget
from shoestring.core.command_line.options import as_arguments, speaking_of_arguments
from shoestring.planning.plan import Outcome
from shoestring.processes.launch import error_stream
from shoestring.processes.signals import stopping_gently
from shoestring.training.library import for_script
from shoestring.training.memory.recompute.checkpoint import Checkpoint
from shoestring.training.planning.plan import TrainingDetails, training_plan

JOB = """
import torch
from torch import nn
from shoestring import Job

def job(width: int = 8) -> Job:
    x = torch.ones(4, width)
    return Job(model=lambda: nn.Linear(width, 3), data=lambda: [(x, torch.zeros(4, dtype=torch.long))] * 3, steps=4)
"""


def job(**settings: Any) -> Job:
    x = torch.ones(4, 8)
    data = [(x, torch.zeros(4, dtype=torch.long))] * 3
    return Job(**{"model": lambda: nn.Linear(8, 3), "data": lambda: data, "steps": 4} | settings)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(JOB)
    return path


def test_dir_has_the_public_names_and_each_has_a_docstring() -> None:
    code = "import shoestring, sys; print(*dir(shoestring)); assert 'torch' not in sys.modules"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert shown == sorted(shoestring.__all__) and {"plan", "train", "fit", "verify", "Job", "OverBudget"} <= set(shown)
    for name in set(shown) - {"__version__"}:
        assert getattr(shoestring, name).__doc__, name
    for name in ("plan", "train", "fit", "verify"):
        assert f"shoestring.{name}(" in getattr(shoestring, name).__doc__, f"{name} has an example"
    with pytest.raises(AttributeError, match="did you mean train"):
        getattr(shoestring, "tar" + "in")


def test_train_and_verify_take_a_job_a_file_and_their_flags(file: Path) -> None:
    assert [step.number for step in shoestring.train(job())] == [1, 2, 3, 4]
    assert len(list(shoestring.train(job(), steps=2))) == 2
    assert len(list(shoestring.train(job(steps=0, epochs=1), epochs=2))) == 6
    assert len(list(shoestring.train(str(file), steps=2, width=5))) == 2
    assert len(list(shoestring.train(file, epochs=1))) == 3
    first = [[step.loss for step in shoestring.train(file, seed=seed)] for seed in (1, 1, 2)]
    assert first[0] == first[1] != first[2]
    found = shoestring.verify(file, (Checkpoint(every=1),), 2, width=5, seed=3)
    assert found == (True, 0.0) and found.same_bits and str(found) == "the same bits"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: shoestring.plan(job(), memory=600),
            r"^memory=600: that is 600 bytes, and no process is that small; did you mean 600MiB\?",
        ),
        (lambda: shoestring.plan(job(), memory="600"), "^memory=600: that is 600 bytes"),
        (
            lambda: shoestring.plan(job(), exact="bits", inexact=True),
            '^exact="bits" asks for same bits and inexact=True allows changed',
        ),
        (lambda: shoestring.plan(job(), exact="bits", devices=2), 'give exact="rounding", or train with one worker'),
        (lambda: shoestring.plan(job(), width=3), "^width: arguments of a job file, and this is a Job"),
        (lambda: shoestring.train(job(), steps=0), "^steps=0: give 1 or more"),
        (lambda: shoestring.train("gtp"), "did you mean gpt?"),
        (lambda: shoestring.plan("gpt", width=64), "^a width of 64 can't be divided among 5 heads"),
        (lambda: shoestring.verify(job(), (), 0), "^check_steps=0: compare at least one step"),
    ],
)
def test_messages_speak_of_arguments(call: Any, said: str) -> None:
    with pytest.raises(Mistake, match=said):
        call()


def test_a_wrong_flag_of_a_job_file_is_told(file: Path) -> None:
    with pytest.raises(Mistake, match=r"mine.py has no argument 'widht'; did you mean width\?"):
        shoestring.train(file, widht=3)


def test_what_is_raised_keeps_its_kind() -> None:
    plan = training_plan()
    with pytest.raises(OverBudget, match=r"^nothing fits: inexact=True allows more$") as found, speaking_of_arguments():
        raise OverBudget("nothing fits: --inexact allows more", plan)
    assert found.value.nearest is plan
    assert (
        as_arguments("the job failed in its model: oh; add --traceback to see more")
        == "the job failed in its model: oh"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("--samples 1: give a whole number", "samples=1: give a whole number"),
        ("give --size 16MB, --keep 0.998 or --fresh", 'give size="16MB", keep="0.998" or fresh=True'),
        ("allow more bytes, or --heal 10m", 'allow more bytes, or heal="10m"'),
        ("give --statistics frozen or another --upload", 'give statistics="frozen" or another upload='),
        ("--width 64 of the job", "width=64 of the job"),
    ],
)
def test_what_can_be_asked_for_in_any_room_is_told_as_its_argument(text: str, said: str) -> None:
    assert as_arguments(text) == said


def test_an_outcome_is_printed_as_the_table_and_a_fit_with_its_loss() -> None:
    figures = {"peak_bytes": 1 << 20, "process_bytes": 300 << 20, "step_seconds": 0.5}
    details = TrainingDetails(parts={"parameters": 1 << 20})
    refused = (("Precision", "--inexact allows it"),)
    outcome = for_script(
        Outcome(
            training_plan((Checkpoint(every=2),), details=details, **figures),
            training_plan(details=details, **figures),
            budget=Budget(memory=600 << 20),
            refused=refused,
        )
    )
    text = str(outcome)
    assert (
        text.startswith("plan for 600 MiB, same bits: Checkpoint(every=2)")
        and "300 MiB" in text
        and "1 combination tried" in text
        and "Precision: inexact=True allows it" in text
    )
    assert str(shoestring.FitResult(outcome, (2.0, 1.0))).endswith("loss 2.000 -> 1.000 in 2 steps")


def test_a_thread_and_a_notebook_have_no_signals_and_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[object] = []

    def work() -> None:
        with stopping_gently(None, [], lambda: None):  # type: ignore[arg-type]
            found.append("inside")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == ["inside"]
    monkeypatch.setattr(sys, "stderr", object())
    assert error_stream() == 2
