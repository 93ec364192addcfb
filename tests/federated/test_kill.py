"""A federation that is killed goes on and ends with the same bits; what it has spent of epsilon is never counted too low."""
from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shoestring
from shoestring.privacy.account import epsilon_of
from shoestring.privacy.spending import Spending
from shoestring.runs.cadence import Cadence
from shoestring.runs.event import Event, Rounded, Saved, Stepped
from shoestring.runs.report import report_of

JOB = '''
from tests.federated.toys import toy_job
from shoestring import Job, Local

def job(devices: int = 12, rate: float = 0.1) -> Job:
    return toy_job(devices, local=Local(epochs=1, batch=4, lr=rate, held_out=0.25))
'''
ROUNDS = 4
EVERY_ROUND = Cadence(steps=1)
PRIVATE = {"epsilon": 8.0, "delta": 1e-2}
CASES: dict[str, dict[str, Any]] = {
    "plain": {}, "private": PRIVATE, "state on devices": {"use": ["Scaffold()"]}, "state on the server": {"use": ["FedAdam()"]},
    "asynchronous": {"use": ["FedBuff(buffer=3, concurrency=6)"]}, "feedback": {"use": ["TopK(share=0.2)", "Quantize()"]},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "job.py").write_text(JOB)
    return tmp_path / "job.py"


def run(file: Path, folder: Path, tell: Callable[[Event], None] | None = None, **asked: Any) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:   # every round is saved
        patch.setattr("shoestring.federated.library.Cadence", lambda **_: EVERY_ROUND)
        done = shoestring.federate(file, rounds=ROUNDS, per_round=6, processes=1, run=folder, tell=tell, **asked)
    return dict(done.report)


def killed(file: Path, folder: Path, at: Callable[[Event], bool], **asked: Any) -> int:
    """Run it in a process that is killed by SIGKILL when such an event is told; gives how it ended."""
    def tell(event: Event) -> None:
        if at(event):
            os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=run, args=(file, folder, tell), kwargs=asked)
    process.start()
    process.join()
    return process.exitcode or 0


@pytest.mark.parametrize("case", CASES)
def test_a_killed_run_ends_with_the_same_bits(case: str, file: Path, tmp_path: Path) -> None:
    whole = run(file, tmp_path / "whole", **CASES[case])
    for number, kind in ((1, Stepped), (2, Rounded), (3, Saved)):   # in three rounds, at three moments, one after the other
        def at(event: Event, number: int = number, kind: type[Event] = kind) -> bool:
            return isinstance(event, kind) and getattr(event, "step", 0) == number

        assert killed(file, tmp_path / "killed", at, **CASES[case]) == -signal.SIGKILL
    again = run(file, tmp_path / "killed", **CASES[case])
    for key in ("weights_sha256", "losses", "bytes_up", "bytes_down", "participants", "epsilon"):
        assert again[key] == whole[key], key


def test_what_is_spent_is_on_disk_before_anything_of_a_round_is_known(file: Path, tmp_path: Path) -> None:
    """Killed at the first word of every round, the ledger has that round already."""
    for number in range(1, ROUNDS + 1):
        assert killed(file, tmp_path / "run", lambda event, number=number: isinstance(event, Stepped) and event.step == number, **PRIVATE)
        spending = Spending(tmp_path / "run")
        entry = next(iter(spending.entries.values()))
        assert len(spending.entries) >= number
        assert spending.epsilon(exactly=True) >= epsilon_of(entry.multiplier, entry.rate, number, PRIVATE["delta"])


def test_noise_that_can_not_keep_the_budget_is_refused_before_the_first_round(file: Path, tmp_path: Path) -> None:
    spent = epsilon_of(1.0, 0.5, 2, 1e-2)   # enough for two of four rounds
    with pytest.raises(shoestring.OverBudget, match="epsilon"):
        run(file, tmp_path / "run", epsilon=spent, delta=1e-2, use=["Clip(norm=0.5)", "GaussianNoise(multiplier=1.0)"])
    assert not (tmp_path / "run" / "privacy.jsonl").exists()


def test_a_run_ends_before_its_budget_is_exceeded(file: Path, tmp_path: Path) -> None:
    """A ledger that holds two more rounds than this run has leaves room for two of the four."""
    folder = tmp_path / "run"
    assert killed(file, folder, lambda event: isinstance(event, Stepped) and event.step == 1, **PRIVATE)
    mine = next(iter(Spending(folder).entries.values()))
    for number in (1000, 1001):
        Spending(folder).spend(replace(mine, round=number, digest="another"))
    report = run(file, folder, **PRIVATE)
    assert report["ended"] == "epsilon is spent" and report["rounds"] == 2 and report["epsilon"] <= PRIVATE["epsilon"]
    assert report_of(folder).state == "finished"


def test_a_private_round_is_never_played_again_with_other_settings(file: Path, tmp_path: Path) -> None:
    """The same noise on another sum would give devices away."""
    folder = tmp_path / "run"
    assert killed(file, folder, lambda event: isinstance(event, Stepped) and event.step == 1, rate=0.1, **PRIVATE)
    with pytest.raises(shoestring.Mistake, match=r"round 1 of .* was begun with other settings"):
        run(file, folder, adopt=True, epsilon=9.0, delta=PRIVATE["delta"])
    with pytest.raises(shoestring.Mistake, match=r"round 1 of .* was begun with other settings"):
        run(file, folder, adopt=True, rate=0.2, **PRIVATE)   # the same plan, and other sums
    file.write_text(JOB.replace("batch=4", "batch=16"))   # of another length: what Python compiled of the file before is not taken for it
    with pytest.raises(shoestring.Mistake, match=r"round 1 of .* was begun with other settings"):
        run(file, folder, adopt=True, rate=0.1, **PRIVATE)
    file.write_text(JOB)
    assert run(file, folder, adopt=True, rate=0.1, **PRIVATE)["rounds"] == ROUNDS, "with those that it was begun with, it goes on"


def test_a_ledger_that_was_deleted_does_not_make_it_forget(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert killed(file, folder, lambda event: isinstance(event, Saved) and event.step == 2, **PRIVATE)
    whole = Spending(folder).epsilon()
    lines = (folder / "privacy.jsonl").read_bytes()
    (folder / "privacy.jsonl").write_bytes(lines[:len(lines) // 2])
    assert Spending(folder, done=2).epsilon() == whole
    (folder / "privacy.jsonl").unlink()
    report = run(file, folder, **PRIVATE)
    assert report["rounds"] == 2 and report["ended"] == "epsilon is spent", "of what kind the lost rounds were, nobody knows"


def test_a_pipe_in_place_of_the_ledger_ends_the_run_before_the_next_round(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert killed(file, folder, lambda event: isinstance(event, Saved) and event.step == 1, **PRIVATE)
    before = report_of(folder).rounds   # what is saved is told later, so the second round may be among them
    (folder / "privacy.jsonl").unlink()
    os.mkfifo(folder / "privacy.jsonl")
    with pytest.raises(OSError, match=r"privacy\.jsonl"):
        run(file, folder, **PRIVATE)
    assert report_of(folder).rounds == before


def test_a_run_that_was_asked_for_something_else_is_refused(file: Path, tmp_path: Path) -> None:
    run(file, tmp_path / "run")
    with pytest.raises(shoestring.Mistake, match="epsilon= changed: not given before, now 4"):
        run(file, tmp_path / "run", epsilon=4.0, delta=1e-2)


def test_the_report_has_what_the_events_say(file: Path, tmp_path: Path) -> None:
    report = run(file, tmp_path / "run", use=["DropOut(rate=0.4)"])
    told = report_of(tmp_path / "run")
    assert told.state == "finished" and [one.step for one in told.rounds] == [1, 2, 3, 4]
    assert [one.participants + one.missing for one in told.rounds] == [6] * 4 and sum(report["missing"]) > 0
    assert report["bytes_up"] == sum(one.up for one in told.rounds) and report["measured"]["up_bytes"] == report["predicted"]["up_bytes"]
    assert report["rounds"] == 4 and len(report["losses"]) == 4 and report["epsilon"] is None
