"""Error messages of devices reach no file and no screen: a KeyError may contain a record."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import shoestring
from shoestring.core.called import guard_loss
from shoestring.federated.device_errors import UnusableRecords, error_kind, withhold_text
from shoestring.federated.techniques.behaviour.flip_classes import check_class
from tests.federated.toys import toy_job
from tests.waiting import HUNG

pytestmark = pytest.mark.usefixtures("warm_workers")

ROOT = Path(__file__).parents[2]
SECRET = "Ada-Lovelace-4711"
JOB = """
import sys
sys.path.insert(0, {root!r})
import torch
from tests.federated.toys import toy_job
from shoestring import Job, Local, Mistake

class Records(list):
    def __getitem__(self, number):
        {in_records}
        return super().__getitem__(number)

def forward(model, batch):
    {in_forward}
    return model(batch[0])

def job(devices: int = 12) -> Job:
    made = toy_job(devices)
    clients = made.clients
    def spoilt():
        found = clients()
        {in_clients}
        return {{name: Records(one) if name in ("d7", "d9") or {everybody} else one for name, one in found.items()}}
    return toy_job(devices, clients=spoilt, local=Local(epochs=1, batch=4, lr=0.1, held_out=0.25), forward=forward)
"""
FAILS = "raise KeyError('Ada-' + 'Lovelace-4711')"
MISTAKEN = "raise Mistake('Ada-' + 'Lovelace-4711')"


def job_file(
    folder: Path, in_records: str = "", in_forward: str = "", in_clients: str = "", everybody: bool = False
) -> Path:
    (folder / "job.py").write_text(
        JOB.format(
            root=str(ROOT),
            in_records=in_records or "pass",
            in_forward=in_forward or "pass",
            in_clients=in_clients or "pass",
            everybody=everybody,
        )
    )
    return folder / "job.py"


def commanded(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shoestring", "federate", "job.py", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=HUNG,
    )


def federated(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return commanded(folder, "--run", "run", "--rounds", "2", "--per-round", "12", *words)


def everything(folder: Path, done: subprocess.CompletedProcess[str]) -> str:
    files = [
        path.read_bytes().decode(errors="replace")
        for path in (folder / "run").rglob("*")
        if path.is_file() and path.suffix != ".py"
    ]
    return "\n".join([done.stdout, done.stderr, *files])


@pytest.mark.parametrize("fails", [FAILS, MISTAKEN])
def test_devices_that_fail_are_counted_by_kind_and_their_text_is_nowhere(tmp_path: Path, fails: str) -> None:
    job_file(tmp_path, in_records=fails)
    done = federated(tmp_path, "--json", "--traceback")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["rejected"] == [2, 2] and {one["name"] for one in report["turned_away"]} == {"d7", "d9"}
    kind = "KeyError" if fails is FAILS else "Mistake"
    assert all(one["why"].startswith(f"{kind} in job.py line ") for one in report["turned_away"])
    assert SECRET not in everything(tmp_path, done) and "KeyError in job.py" * (fails is FAILS) in everything(
        tmp_path, done
    )


@pytest.mark.parametrize("where", ["in_records", "in_forward", "in_clients"])
def test_what_fails_everywhere_is_told_by_its_place_and_not_by_its_text(tmp_path: Path, where: str) -> None:
    job_file(tmp_path, everybody=True, **{where: FAILS})
    for words in ((), ("--traceback",), ("--task", "evaluate")):
        done = commanded(tmp_path, *words, "--traceback") if words[:1] == ("--task",) else federated(tmp_path, *words)
        assert done.returncode == 2 and "KeyError" in done.stderr and "job.py" in done.stderr, done.stderr
        assert SECRET not in everything(tmp_path, done)


def test_a_script_is_told_no_more() -> None:
    def broken() -> dict[str, object]:
        raise KeyError(SECRET)

    with pytest.raises(
        shoestring.Mistake, match=r"the job failed in test_device_errors.py line \d+: KeyError"
    ) as caught:
        shoestring.federate(toy_job(clients=broken), processes=1)
    assert SECRET not in str(caught.value) and SECRET not in str(caught.value.__cause__)


def test_a_private_run_names_no_device(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    job_file(tmp_path, in_records=FAILS)
    done = federated(tmp_path, "--json", "--epsilon", "50", "--delta", "1e-2")
    assert done.returncode == 0, done.stderr
    report, whole = json.loads(done.stdout), everything(tmp_path, done)
    assert sum(report["rejected"]) == 4 and report["turned_away"][0]["name"] == ""
    assert SECRET not in whole and '"d7"' not in whole and '"d9"' not in whole


def test_words_of_our_own_are_told() -> None:
    error = UnusableRecords("d7", "it has no records", "leave it out")
    assert error_kind(error) == "it has no records"
    assert str(error) == "the client 'd7' can't be used, it has no records: leave it out"


def test_a_mistake_is_told_in_its_words_where_our_line_raised_it_and_by_its_place_where_another_error_is_in_it() -> (
    None
):
    def loss(output: object, batch: tuple[int, ...]) -> object:
        raise TypeError(f"a tuple, {SECRET}")

    for call, told in (
        (lambda: check_class(7, 3), "not from 0 to 2, as Malicious expects"),
        (lambda: guard_loss(loss)(0, (1,)), "Mistake in "),
    ):
        with pytest.raises(shoestring.Mistake) as caught:
            call()
        assert told in error_kind(caught.value) and SECRET not in error_kind(caught.value)


def test_what_stands_for_an_error_has_its_lines_and_not_its_text_nor_its_cause() -> None:
    try:
        try:
            raise KeyError(SECRET)
        except KeyError as error:
            raise ValueError(SECRET) from error
    except ValueError as error:
        import traceback

        found = withhold_text(error)
        text = "".join(traceback.format_exception(found))
    assert "test_device_errors.py" in text and "ValueError" in text and SECRET not in text.replace("SECRET", "")
