"""A run's folder as a user meets it: resumed, refused, adopted, begun anew, planned again, exported."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from shoestring.runs.events.event import Stepped
from shoestring.runs.events.event_log import Events
from shoestring.runs.folder import holder
from shoestring.runs.reports.report import report_of
from tests.records import records, steps_in
from tests.show.made_runs import append, made_run, step_fields
from tests.waiting import HUNG, PASS_GATE, Gates, until

pytestmark = pytest.mark.usefixtures("warm_workers")
REAL = sys.executable  # of a test whose worker can't listen yet, because it imports torch

JOB = (
    PASS_GATE
    + """
import itertools
import torch
from torch import nn
from shoestring import Job

class Model(nn.Module):
    def __init__(self, width, greedy):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)))
        self.head, self.greedy, self.seen = nn.Linear(width, 4), greedy, 0
    def forward(self, x):
        self.seen += len(x) / 16   # batches, in however many pieces
        if self.greedy and self.seen > self.greedy:
            torch.empty(1 << 60)
        return self.head(self.blocks(x))

def data(hold):
    for number in itertools.count(1):
        pass_gate(hold, number)
        x = torch.randn(16, 64)
        yield x, x[:, :4].argmax(1)

def job(width: int = 64, steps: int = 12, hold: str = "", greedy: int = 0) -> Job:
    return Job(model=lambda: Model(width, greedy), data=lambda: data(hold), steps=steps)
"""
)
PLAN = {
    "shoestring": 3,
    "chosen": {
        "techniques": [{"name": "FusedOptimizer", "knobs": {}}],
        "peak_bytes": 1 << 20,
        "process_bytes": 1 << 29,
        "step_seconds": 0.01,
        "exactness": "to rounding",
    },
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "small.py").write_text(JOB)
    (tmp_path / "saved.json").write_text(json.dumps(PLAN))
    return tmp_path


def shoestring(place: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shoestring", *map(str, words)], cwd=place, capture_output=True, text=True, timeout=HUNG
    )


def train(place: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return shoestring(place, "train", "small.py", "--run", "a", "--save-every", 4, *words)


def test_a_run_is_resumed_refused_adopted_and_begun_anew(place: Path) -> None:
    first = train(place, "--plan", "saved.json", "--json")
    assert first.returncode == 0, first.stderr
    report = json.loads(first.stdout)
    assert {path.name for path in (place / "a").iterdir()} == {
        "run.json",
        "job.py",
        "plan.json",
        "events.jsonl",
        "checkpoints",
        "report.json",
        "report.html",
        "lock",
        "modules.json",
    }
    assert json.loads((place / "a" / "run.json").read_text())["environment"]["torch"]

    again = train(place, "--json")  # finished: nothing is trained again
    assert again.returncode == 0 and json.loads(again.stdout) == report

    other = train(place, "--steps", 20)
    assert other.returncode == 2 and "--steps changed: 12 before, now 20" in other.stderr and "--adopt" in other.stderr
    adopted = train(place, "--steps", 20, "--adopt", "--plan", "saved.json", "--json")
    assert adopted.returncode == 0, adopted.stderr
    longer = json.loads(adopted.stdout)
    assert longer["steps"] == 20 and longer["losses"][:12] == report["losses"]
    events = records(place / "a")
    assert [event["step"] for event in events if event["event"] == "begun"] == [0, 12]
    assert "steps" in next(event for event in events if event["event"] == "adopted")["differences"][0]

    (place / "small.py").write_text(JOB + "\n# changed\n")
    changed = train(place)
    assert changed.returncode == 2 and "the job file small.py is not the one it was begun with" in changed.stderr
    fresh = train(place, "--fresh", "--plan", "saved.json", "--json")
    assert fresh.returncode == 0 and json.loads(fresh.stdout)["weights_sha256"] == report["weights_sha256"]
    assert len(list(place.glob("a-before-*"))) == 1


@pytest.mark.slow
def test_an_adopted_run_that_is_killed_is_not_taken_for_finished(place: Path) -> None:
    assert train(place, "--plan", "saved.json").returncode == 0
    words = [
        "train",
        "small.py",
        "--run",
        "a",
        "--plan",
        "saved.json",
        "--steps",
        "40",
        "--hold",
        ".",
        "--adopt",
        "--save-every",
        "4",
    ]
    with Gates(place, 20):
        longer = subprocess.Popen(
            [sys.executable, "-m", "shoestring", *words],
            cwd=place,
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        until(lambda: len(steps_in(records(place / "a"))) >= 18, "step 18")
        longer.kill()
        longer.wait()
    until(lambda: holder(place / "a") is None, "the worker's end")
    done = train(place, "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["steps"] == 40, done.stderr


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    caught = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def test_stopped_before_it_could_listen_it_says_so(place: Path) -> None:
    words = ["train", "small.py", "--run", "a", "--plan", "saved.json", "--hold", "."]
    with Gates(place, 1):
        first = subprocess.Popen(
            [REAL, "-m", "shoestring", *words], cwd=place, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        until(lambda: catches(first.pid, signal.SIGTERM), "the start of its worker")
        first.send_signal(signal.SIGTERM)
    _, said = first.communicate(timeout=HUNG)
    assert first.returncode == 130 and "goes on from there" in said and "Traceback" not in said, said


def test_the_second_process_in_a_folder_is_refused_with_the_first_ones_pid(place: Path) -> None:
    words = ["train", "small.py", "--run", "a", "--plan", "saved.json", "--hold", ".", "--steps", "1000000"]
    with Gates(place, 3):
        first = subprocess.Popen(
            [sys.executable, "-m", "shoestring", *words],
            cwd=place,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        until(lambda: steps_in(records(place / "a")), "the first step")
        second = train(place)
        pid = holder(place / "a")
        assert second.returncode == 2 and f"in use by process {pid}" in second.stderr and pid is not None
        first.send_signal(signal.SIGINT)  # Ctrl-C: it saves and says how to go on
    _, said = first.communicate(timeout=HUNG)
    assert first.returncode == 130 and "the same command goes on from there" in said
    assert records(place / "a")[-1]["event"] == "stopped" and holder(place / "a") is None
    assert list((place / "a" / "checkpoints").glob("step-*"))


@pytest.mark.slow
def test_killed_during_the_plan_it_plans_again(place: Path) -> None:
    first = subprocess.Popen(
        [sys.executable, "-m", "shoestring", "train", "small.py", "--run", "a"],
        cwd=place,
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    until(lambda: records(place / "a"), "the first event")
    first.kill()
    first.wait()
    done = train(place, "--json")
    assert done.returncode == 0, done.stderr
    assert [event["event"] for event in records(place / "a")].count("planning") == 2


def test_memory_that_runs_out_leads_to_another_plan(place: Path) -> None:
    """The model wants too much after 200 steps; a process that goes on, or plans (with fewer, on a busy machine too), counts anew."""
    words = ("--greedy", 200, "--steps", 204)
    done = train(place, "--plan", "saved.json", *words)
    assert done.returncode == 3 and "Traceback" not in done.stderr, done.stderr
    assert (
        "memory ran out" in done.stderr
        and "its checkpoint of step 200 is whole" in done.stderr
        and "--replan" in done.stderr
    )
    offered = json.loads((place / "a" / "plan-next.json").read_text())["chosen"]["techniques"]
    again = train(place, "--replan", *words)
    assert again.returncode == 0 and "going on after step 200" in again.stderr, again.stderr
    assert json.loads((place / "a" / "plan.json").read_text())["chosen"]["techniques"] == offered


def test_near_its_budget_a_run_says_so_before_it_dies(place: Path) -> None:
    small = {"shoestring": 3, "chosen": PLAN["chosen"] | {"process_bytes": 100 << 20}}
    (place / "saved.json").write_text(json.dumps(small))
    done = train(place, "--plan", "saved.json", "--memory", "150MiB")
    assert done.returncode == 0 and "it may run out of memory" in done.stderr
    assert [event["event"] for event in records(place / "a")].count("warning") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--fresh"], "name it with --run"),
        (["--run", "a", "--fresh", "--adopt"], "give one of them"),
        (["--run", "a", "--save-every", "soon"], "write a number of steps (50) or a time"),
        (["--run", "a", "--keep", "0"], "at least one checkpoint"),
        (["--run", "small.py"], "is not a run of shoestring"),
        (["--run", "."], "is not a run of shoestring"),
    ],
)
def test_a_mistake_about_runs_is_told_before_anything_is_written(words: list[str], said: str, place: Path) -> None:
    before = sorted(place.iterdir())
    done = shoestring(place, "train", "small.py", *words)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert sorted(place.iterdir()) == before


def test_exports(place: Path) -> None:
    assert train(place, "--plan", "saved.json", "--tensorboard").returncode == 0
    assert list((place / "a" / "tensorboard").glob("events.out.tfevents*"))
    for kind, name in (("safetensors", "export.safetensors"), ("csv", "export.csv"), ("json", "export.json")):
        done = shoestring(place, "export", "a", "--to", kind, "--json")
        assert json.loads(done.stdout)["path"] == f"a/{name}", done.stderr
    assert "head.weight" in load_file(place / "a" / "export.safetensors")
    with open(place / "a" / "export.csv") as file:
        rows = list(csv.DictReader(file))
    losses = json.loads((place / "a" / "export.json").read_text())["losses"]
    assert [float(row["loss"]) for row in rows] == losses and len(losses) == 12
    for words, said in (
        (["--to", "csv"], "is there already"),
        (["--to", "hf", "--job", "small.py"], "not a model of transformers"),
        (["--to", "safetensors", "--step", "5", "--out", "x"], "no checkpoint of step 5; there are 4, 8, 12"),
    ):
        done = shoestring(place, "export", "a", *words)
        assert done.returncode == 2 and said in done.stderr


GPT2 = """
import torch, transformers
from shoestring import Job

def job() -> Job:
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50, n_positions=16)
    ids = torch.arange(32).reshape(2, 16)
    return Job(model=lambda: transformers.GPT2LMHeadModel(config), data=lambda: [{"input_ids": ids, "labels": ids}] * 9, steps=3)
"""


def test_a_transformers_model_is_exported_for_from_pretrained(place: Path) -> None:
    import torch
    import transformers

    (place / "small.py").write_text(GPT2)
    assert train(place, "--plan", "saved.json").returncode == 0
    done = shoestring(place, "export", "a", "--job", "small.py", "--to", "hf", "--out", "out")
    assert done.returncode == 0, done.stderr
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(place / "out")
    weights = load_file(next((place / "a" / "checkpoints").glob("step-00000003/weights.safetensors")))
    assert all(
        torch.equal(model.state_dict()[name], value) for name, value in weights.items() if name in model.state_dict()
    )
    assert model.lm_head.weight is model.transformer.wte.weight


def test_a_torn_line_and_a_full_disk_lose_events_and_nothing_else(tmp_path: Path) -> None:
    events = Events(tmp_path)
    events.add(Stepped(**step_fields(1)))
    os.write(events.file, b'{"event": "step", "st')  # killed in the middle of a line
    events.close()
    Events(tmp_path).add(Stepped(**step_fields(2)))
    assert [event["step"] for event in records(tmp_path)] == [1, 2]
    full = Events(tmp_path)
    os.close(full.file)
    full.file = os.open("/dev/full", os.O_WRONLY)
    full.add(Stepped(**step_fields(3)))
    os.close(full.file)
    full.file = os.open(tmp_path / "events.jsonl", os.O_RDWR | os.O_APPEND)
    full.add(Stepped(**step_fields(4)))
    assert [event["step"] for event in records(tmp_path)] == [1, 2, 4]


def test_the_first_steps_of_every_life_do_not_count_as_a_step_s_time(tmp_path: Path) -> None:
    path = made_run(tmp_path / "run")

    def went_on(first: int, *seconds: float) -> float:
        append(
            path,
            [
                {"event": "begun", "time": 1e9, "pid": 1, "steps": 9, "step": first, "how": ""},
                *(
                    {"event": "step", "time": 1e9, **step_fields(first + number), "seconds": one}
                    for number, one in enumerate(seconds, 1)
                ),
            ],
        )
        found: float = report_of(path).measured["step_seconds"]
        return found

    assert went_on(0, 9.0, 3.0) == 3.0, "the best there is"
    assert went_on(2, 9.0, 5.0) == 4.0, "the second of each life"
    assert went_on(4, 9.0, 9.0, 1.0) == 1.0, "one that is neither first nor second"


def test_the_measured_peak_is_the_highest_of_all_its_lives_with_this_plan(tmp_path: Path) -> None:
    """A resumed run makes no moments, so its own peak is lower than that of the run."""
    path = made_run(tmp_path / "run", done=10)

    def told(kind: str, **fields: Any) -> int:
        append(path, [{"event": kind, "time": 1e9, **fields}])
        peak: int = report_of(path).measured["peak_bytes"]
        return peak

    assert told("measured", peak_bytes=200, where="update") == 200
    assert told("measured", peak_bytes=150, where="backward") == 200
    append(path, [{"event": "adopted", "time": 1e9, "differences": ["another plan"]}])
    assert told("measured", peak_bytes=100, where="backward") == 200, "nothing was trained by the other plan yet"
    assert told("step", **step_fields(11) | {"most": 7}) == 100 and report_of(path).measured["process_bytes"] == 7
