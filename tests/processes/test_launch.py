"""What is said of a worker that ended without a word, and of one that was asked to stop."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from shoestring.core.errors import Crashed
from shoestring.processes.launch import StoppingWorker, ending_text, result_without_message, stands
from shoestring.processes.signals import stopping_gently
from tests.tasks import train_task


def test_a_killed_worker_is_told_with_what_that_may_mean_and_where_the_run_stands(tmp_path: Path) -> None:
    task = train_task(tmp_path / "job.py", 3, folder=tmp_path)
    with pytest.raises(
        Crashed,
        match=r"died with SIGKILL: it was killed from outside, by a person, .* \(dmesg would tell\)\. It had "
        r"saved no checkpoint yet: the same command with --run .* begins anew",
    ):
        result_without_message(task, -signal.SIGKILL, [], False)
    assert "somebody" not in ending_text(-signal.SIGKILL) and stands(train_task(tmp_path / "job.py", 3)) == ""


class Child:
    def __init__(self) -> None:
        self.got: list[int] = []

    def send_signal(self, sig: int) -> None:
        self.got.append(sig)


@pytest.mark.parametrize(
    ("listens", "number", "passed"),
    [
        (True, signal.SIGINT, signal.SIGINT),
        (False, signal.SIGINT, signal.SIGTERM),
        (True, signal.SIGTERM, signal.SIGTERM),
        (True, signal.SIGHUP, signal.SIGHUP),
        (False, signal.SIGHUP, signal.SIGTERM),
    ],
)
def test_a_signal_reaches_a_worker_as_that_once_it_listens(listens: bool, number: int, passed: int) -> None:
    child, asked = Child(), list[int]()
    worker = StoppingWorker(child)  # type: ignore[arg-type]
    worker.listens = listens
    with stopping_gently(worker, asked, lambda: None):
        signal.raise_signal(number)
    assert child.got == [passed] and asked == [number]
