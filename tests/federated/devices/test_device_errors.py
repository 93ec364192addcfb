"""Error messages of devices reach no file and no screen: a KeyError may contain a record."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from asyncio import CancelledError
from pathlib import Path

import pytest
import torch

import shoestring
from shoestring.core.user_code.user_functions import guard_loss
from shoestring.federated.devices.device_errors import UnusableRecords, WithheldError, error_kind, withhold_text
from shoestring.federated.devices.device_output import withheld_output
from shoestring.federated.devices.records import records_of
from shoestring.federated.events import RoundFinished
from shoestring.federated.techniques.behaviour.flip_classes import check_class
from shoestring.runs.events.history import History
from tests.federated.toys import records, toy_job
from tests.waiting import HUNG

pytestmark = pytest.mark.usefixtures("warm_workers")

ROOT = Path(__file__).parents[3]
SECRET = "Ada-Lovelace-4711"
JOB = """
import sys
sys.path.insert(0, {root!r})
import torch
from tests.federated.toys import records, toy_job
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
SAID = "'Ada-' + 'Lovelace-4711'"
NAMED_AFTER_A_RECORD = {
    "class": f"raise type({SAID}, (KeyError,), {{}})('x')",
    "class and module": f"raise type('E', (KeyError,), dict(__module__={SAID}, __qualname__={SAID}))('x')",
    "file": f"exec(compile('raise KeyError(1)', '/home/' + {SAID} + '.csv', 'exec'), {{}})",
    "a Mistake of ours, raised by the job": "from shoestring.federated.devices.device_errors import UnusableRecords; "
    f"raise UnusableRecords('d7', {SAID}, 'x')",
    "exit": f"raise SystemExit({SAID})",
    "as if the user had stopped it": f"raise KeyboardInterrupt({SAID})",
    "as if it had been cancelled": f"import asyncio; raise asyncio.CancelledError({SAID})",
    "as if it had been closed": f"raise GeneratorExit({SAID})",
    "note": f"error = KeyError(); error.add_note({SAID}); raise error",
}
SAYS = (
    f"print({SAID})",
    f"print({SAID}, file=sys.stderr)",
    f"warnings.warn({SAID})",
    f"logging.getLogger('job').warning({SAID})",
    f"one = threading.Thread(target=lambda: [][{SAID}]); one.start(); one.join()",
    f"type('One', (), {{'__del__': lambda self: {{}}[{SAID}]}})()",
    f"before.write({SAID}); before.flush(); buffered.write({SAID})",
    f"sys.__stderr__.write({SAID})",
    f"library.info({SAID})",
    f"os.write(1, ({SAID}).encode()); os.system('echo ' + {SAID} + ' >&2')",
)
KEEPS = """
import logging, os, sys, threading, warnings
logging.basicConfig()
library, before, buffered = logging.getLogger('library'), sys.stderr, sys.stdout
library.addHandler(logging.StreamHandler())
library.propagate = False
library.setLevel(logging.INFO)
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


@pytest.mark.parametrize("way", NAMED_AFTER_A_RECORD)
def test_no_class_and_no_file_that_is_named_after_a_record_is_told(tmp_path: Path, way: str) -> None:
    file = job_file(tmp_path, in_records=NAMED_AFTER_A_RECORD[way])
    report = shoestring.federate(file, rounds=1, per_round=12, processes=1).report
    assert report["rejected"] == [2] and SECRET not in json.dumps(report)
    kinds = {one["why"].partition(" in job.py line ")[0] for one in report["turned_away"]}
    assert kinds <= {
        "KeyError",
        "UnusableRecords",
        "SystemExit",
        "KeyboardInterrupt",
        "CancelledError",
        "GeneratorExit",
    }


def interrupts_on_device_7(output: torch.Tensor, batch: list[torch.Tensor]) -> torch.Tensor:
    if len(batch[1]) == 1:
        raise KeyboardInterrupt(SECRET)
    return torch.nn.functional.cross_entropy(output, batch[1])


@pytest.mark.parametrize("processes", [1, 2])
def test_a_device_that_raises_keyboard_interrupt_has_failed_and_nobody_has_stopped_the_run(processes: int) -> None:
    clients = {f"d{number}": records(number, 1 if number == 7 else 8) for number in range(8)}
    job = toy_job(
        clients=lambda: clients, loss=interrupts_on_device_7, local=shoestring.Local(epochs=1, batch=4, lr=0.1)
    )
    report = shoestring.federate(job, rounds=1, per_round=8, processes=processes).report
    assert [(one["name"], one["why"][:17]) for one in report["turned_away"]] == [("d7", "KeyboardInterrupt")]


def test_the_users_own_interrupt_ends_what_devices_do() -> None:
    with pytest.raises(KeyboardInterrupt), withheld_output():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_lines_of_code_that_a_record_named_are_not_in_a_traceback() -> None:
    try:
        exec(compile("raise KeyError(1)", f"/home/{SECRET}.csv", "exec"), {})
    except KeyError as error:
        text = "".join(traceback.format_exception(withhold_text(error)))
    assert SECRET not in text and "test_device_errors.py" in text


def test_nothing_that_devices_say_is_shown_but_that_they_do(tmp_path: Path) -> None:
    file = job_file(tmp_path, in_records="; ".join(SAYS))
    file.write_text(KEEPS + file.read_text())
    done = federated(tmp_path, "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["rejected"] == [0, 0], done.stderr
    assert SECRET not in everything(tmp_path, done) and done.stderr.count("what devices print") == 1


def test_a_threads_output_that_is_no_devices_goes_on(capfd: pytest.CaptureFixture[str]) -> None:
    begin, goes_on = threading.Event(), threading.Event()

    def print_line() -> None:
        begin.wait(HUNG)
        print("heard", file=sys.stderr)
        goes_on.set()

    other = threading.Thread(target=print_line)
    other.start()
    with withheld_output():
        begin.set()
        assert goes_on.wait(HUNG)
        os.write(2, SECRET.encode())
    other.join()
    os.write(2, b"after")
    shown = capfd.readouterr().err
    assert "heard\n" in shown and shown.endswith("after") and SECRET not in shown


def test_an_error_that_is_no_exception_loses_its_text() -> None:
    with pytest.raises(WithheldError, match="CancelledError, whose text is withheld") as caught, withheld_output():
        raise CancelledError(SECRET)
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    assert error_kind(caught.value).startswith("CancelledError in test_device_errors.py line ")


def test_a_metric_that_is_named_after_a_record_is_counted(tmp_path: Path) -> None:
    def metrics(output: torch.Tensor, batch: list[torch.Tensor]) -> dict[str, float]:
        return {"accuracy": 0.5, f"errors of {float(batch[0].sum())}": 0.1}

    done = shoestring.federate(toy_job(metrics=metrics), rounds=1, per_round=6, processes=1)
    assert set(done.after[-1]) == {"round", "accuracy", "loss"} and "errors of" not in json.dumps(done.report)
    assert "too few devices measured 6 metrics" in json.dumps(done.report)


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
    rounds = History().read(tmp_path / "run").of_kind(RoundFinished)
    assert rounds and not any(one.samples for one in rounds), "a sum of record counts may tell who took part"


def test_words_of_our_own_are_told() -> None:
    with pytest.raises(UnusableRecords) as caught:
        records_of(toy_job(), "d7", [], 0)
    assert error_kind(caught.value) == "it has no records"
    assert str(caught.value) == "the client 'd7' can't be used, it has no records: leave it out of the job's clients"
    with pytest.raises(UnusableRecords) as said:
        raise UnusableRecords("d7", SECRET, "")
    assert SECRET not in error_kind(said.value)


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
        found = withhold_text(error)
        text = "".join(traceback.format_exception(found))
    assert "test_device_errors.py" in text and "ValueError" in text and SECRET not in text.replace("SECRET", "")
