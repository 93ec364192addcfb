"""shoestring federate as a user meets it: JSON, exit codes, one clear message for every mistake."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import HUNG, until

pytestmark = pytest.mark.usefixtures("warm_workers")

ROOT = Path(__file__).parents[2]
JOB = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from dataclasses import replace
import torch
from torch.utils.data import TensorDataset
from shoestring import Iid, Job
from tests.federated.toys import records, toy_job

def job(devices: int = 12, kind: str = "") -> Job:
    made = toy_job(devices)
    if kind == "none":
        return replace(made, clients=None, metrics=None)
    if kind == "empty":
        return replace(made, clients=lambda: {{}})
    if kind == "rule":
        return replace(made, clients=Iid(), data=lambda: TensorDataset(torch.zeros(50, 6)))
    if kind == "with an empty one":
        return replace(made, clients=lambda: {{"full": records(1), "empty": [], "other": records(2)}})
    return made
"""
KEYS = {
    "rounds",
    "losses",
    "metrics",
    "weights_sha256",
    "clients_per_second",
    "bytes_up",
    "bytes_down",
    "epsilon",
    "participants",
    "missing",
    "rejected",
    "predicted",
    "measured",
}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "toy.py").write_text(JOB)
    return tmp_path / "toy.py"


def shoestring(job: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shoestring", "federate", str(job), *words],
        cwd=job.parent,
        capture_output=True,
        text=True,
        timeout=HUNG,
    )


def told(job: Path, *words: str) -> dict[str, Any]:
    done = shoestring(job, *words, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_json_has_what_was_promised_and_the_same_seed_gives_the_same_bits(job: Path) -> None:
    first = told(job, "--per-round", "6", "--rounds", "2", "--run", "a", "--processes", "1")
    again = told(job, "--per-round", "6", "--rounds", "2", "--run", "b", "--processes", "2")
    other = told(job, "--per-round", "6", "--rounds", "2", "--run", "c", "--seed", "4")
    assert first.keys() >= KEYS
    assert first["weights_sha256"] == again["weights_sha256"] != other["weights_sha256"]
    assert first["predicted"]["up_bytes"] == first["measured"]["up_bytes"] and first["participants"] == [6, 6]
    assert told(job, "--run", "a")["weights_sha256"] == first["weights_sha256"], "a finished run is told again"


def test_a_plan_sends_what_was_predicted(job: Path) -> None:
    for number, words in enumerate(
        (
            ["--use", "TopK(share=0.2)", "--use", "QuantizeUpdates()"],
            ["--upload", "200B"],
            ["--upload", "70B", "--download", "200B"],
            ["--upload", "300B", "--epsilon", "50", "--delta", "1e-2"],
        )
    ):
        found = told(job, "--per-round", "6", "--rounds", "2", "--run", f"run {number}", *words)
        assert found["techniques"] and found["predicted"]["up_bytes"] == found["measured"]["up_bytes"], words
        assert found["predicted"]["down_bytes"] == found["measured"]["down_bytes"]


def test_nothing_is_left_out_of_updates_for_the_sake_of_noise_alone(job: Path) -> None:
    """Where noise is much larger than the update, leaving some of it out looks like less error if the clip is rounded luckily."""
    for seed in ("3", "4", "5"):
        plan = told(job, "--per-round", "3", "--epsilon", "0.5", "--delta", "1e-4", "--seed", seed, "--plan-only")
        assert [one["name"] for one in plan["chosen"]["techniques"]] == ["Clip", "GaussianNoise"]


def test_budgets_are_met_by_choosing_and_the_choice_is_explained(job: Path) -> None:
    plan = told(job, "--per-round", "6", "--upload", "200B", "--download", "300B", "--plan-only")
    assert plan["chosen"]["up_bytes"] <= 200 and plan["chosen"]["down_bytes"] <= 300 and plan["plain"]["up_bytes"] > 300
    assert plan["runners_up"] and all(one["lost"] for one in plan["runners_up"])
    shown = shoestring(job, "--per-round", "6", "--upload", "200B", "--plan-only").stdout
    assert "chosen" in shown and "12 clients, 6 a round" in shown and "devices: " in shown


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--upload", "20B"], "nothing fits 20 B"),
        (["--epsilon", "0.01", "--delta", "1e-9", "--upload", "20B"], "nothing fits"),
        (["--use", "QuantizeUpdates()", "--upload", "20B"], "QuantizeUpdates() does not keep the budget: up: "),
    ],
)
def test_budgets_that_can_not_be_met_are_refused_with_the_nearest(job: Path, words: list[str], why: str) -> None:
    done = shoestring(job, "--per-round", "6", *words, "--json")
    assert done.returncode == 3 and why in done.stderr, done.stderr
    assert json.loads(done.stdout)["nearest"]["up_bytes"] > 20


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--per-round", "13"], "--per-round 13 and there are 12 clients"),
        (["--clients", "13"], "--clients 13, and the job has 12"),
        (["--per-round", "0"], "--per-round 0: give a whole number, 1 or more"),
        (["--rounds", "many"], "--rounds many: give a whole number"),
        (["--epsilon", "4"], "give --delta too"),
        (["--delta", "1e-6"], "goes with --epsilon"),
        (["--epsilon", "-1", "--delta", "1e-6"], "epsilon=-1: give a number"),
        (["--epsilon", "4", "--delta", "2"], "--delta 2: give a chance above 0 and below 1"),
        (["--use", "FedAdm()"], "did you mean FedAdam?"),
        (["--use", "FedAdam(rate=1)"], "FedAdam has no knob 'rate'"),
        (["--use", "Krum(malicious=1)", "--use", "CoordinateMedian()"], "both say how updates are combined"),
        (["--use", "Rotate()"], "Rotate is of no use without QuantizeUpdates"),
        (["--use", "TopK(share=2)"], "share"),
        (["--kind", "none"], "the job has no clients"),
        (["--kind", "empty"], "the job's clients are none"),
        (["--kind", "rule", "--clients", "60"], "60"),
        (["--fresh"], "name it with --run"),
        (["--task", "tune"], "--task tune needs settings"),
        (["--settings", "lr=1"], "--settings is for --task evaluate or tune or compare"),
        (["--task", "compare"], "two models or two settings"),
        (["--task", "evaluate", "--model", "nowhere"], "nowhere is no run"),
        (["--task", "evaluate", "--settings", "rate=1"], "no setting 'rate'"),
        (["--task", "evaluate", "--least", "13"], "results are released for at least 13"),
        (["--upload", "lots"], "lots"),
    ],
)
def test_a_mistake_gets_one_clear_message(job: Path, words: list[str], why: str) -> None:
    done = shoestring(job, *words)
    assert done.returncode == 2 and why in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not done.stdout


def test_an_empty_client_is_named_and_counted_and_the_round_goes_on(job: Path) -> None:
    found = told(job, "--kind", "with an empty one", "--per-round", "3", "--rounds", "2")
    assert found["rejected"] == [1, 1] and found["participants"] == [2, 2]
    assert found["turned_away"][0]["name"] == "empty" and "has no records" in found["turned_away"][0]["why"]


def test_it_is_verified_against_the_plain_sequential_round(job: Path) -> None:
    found = told(job, "--per-round", "6", "--verify", "--processes", "2")
    assert found["kept"] and len(found["verdicts"]) >= 1 and len(found["losses"]) == 2


def test_two_runs_are_compared_on_devices_own_records_and_the_page_shows_it(job: Path) -> None:
    for name, rounds in (("short", "1"), ("long", "12")):
        told(job, "--per-round", "6", "--rounds", rounds, "--run", name)
    found = told(job, "--task", "compare", "--model", "short", "--model", "long", "--as-is")
    loss = next(one for one in found["changes"] if one["metric"] == "loss" and not one["group"])
    assert loss["devices"] == [12, 12] and loss["delta"] < 0 and loss["low"] <= loss["percent"] <= loss["high"]
    assert "long against short" in (job.parent / "long" / "comparisons.json").read_text()
    best = told(job, "--task", "tune", "--model", "short", "--settings", "lr=0.000001,0.1")["best"]
    assert best["candidate"]["settings"] == {"lr": 0.1}


def test_it_stops_when_asked_to_and_goes_on_by_the_same_command(job: Path) -> None:
    words = ["--per-round", "6", "--rounds", "100000", "--run", "run"]
    started = subprocess.Popen(
        [sys.executable, "-m", "shoestring", "federate", str(job), *words],
        cwd=job.parent,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    events = job.parent / "run" / "events.jsonl"
    until(lambda: events.exists() and b'"round"' in events.read_bytes(), "the first round")
    started.send_signal(signal.SIGTERM)
    _, said = started.communicate(timeout=HUNG)
    assert started.returncode == 130 and "asked to by SIGTERM" in said and "goes on from there" in said, said
    done = [json.loads(line)["step"] for line in events.read_text().splitlines() if '"event":"step"' in line][-1]
    words[words.index("100000")] = str(done + 3)
    assert told(job, *words, "--adopt")["rounds"] == done + 3
