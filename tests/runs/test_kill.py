"""The kill matrix: whatever dies and whenever, going on gives the same bits as never having been killed.

The job draws (dropout, data from the global generators), accumulates, recomputes and scales its loss in fp16, so everything that a
checkpoint must hold is in play. The same with its state streamed from disk, which is half updated whenever it is killed in backward.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shoestring.core.errors import Crashed
from shoestring.processes.launch import run_worker
from shoestring.processes.task import task_text
from shoestring.runs.checkpoints.checkpoints import newest_good
from shoestring.runs.events.event import Begun, Event, Saved, Stepped, Warned
from shoestring.runs.folder import holder
from shoestring.training.execution.tasks import TrainResult, TrainTask
from tests.records import records, steps_in
from tests.tasks import train_task
from tests.waiting import PASS_GATE, Gates, state_of, until

pytestmark = pytest.mark.usefixtures("warm_workers")

STEPS = 24
JOB = (
    PASS_GATE
    + """
import itertools, os, random, signal
import numpy, torch
from torch import nn
from shoestring import Job

def data(hold):
    for number in itertools.count(1):
        pass_gate(hold, number)
        x = torch.randn(16, 64) + random.random() + float(numpy.random.rand())   # all three generators
        yield {"x": x, "y": x[:, :10].argmax(1)}

class Deadly(nn.Module):   # kills its process in backward, once
    def __init__(self, flag): super().__init__(); self.flag, self.calls = flag, 0

    def forward(self, x):
        self.calls += 1
        if self.flag and self.calls == 8 and not os.path.exists(self.flag):
            x.register_hook(lambda gradient: (open(self.flag, "w"), os.kill(os.getpid(), signal.SIGKILL)) and None)
        return x

def kill_in_save(saving):   # kills its process when the second file of the second checkpoint is on the disk, once
    fsync, left = os.fsync, [2]

    def synced(file):
        fsync(file)
        left[0] -= "step-00000006.tmp-" in os.readlink(f"/proc/self/fd/{file}")
        if not left[0] and not os.path.exists(saving):
            open(saving, "w")
            os.kill(os.getpid(), signal.SIGKILL)

    os.fsync = synced

def job(hold: str = "", steps: int = 24, flag: str = "", saving: str = "") -> Job:
    if saving:
        kill_in_save(saving)
    block = lambda: nn.Sequential(nn.Linear(64, 260), nn.GELU(), nn.Dropout(0.2), nn.Linear(260, 64))
    return Job(model=lambda: nn.Sequential(block(), block(), Deadly(flag), block(), block(), block(), nn.Linear(64, 10)),
               data=lambda: data(hold), forward=lambda model, batch: model(batch["x"]), steps=steps,
               loss=lambda output, batch: nn.functional.cross_entropy(output.float(), batch["y"]))
"""
)
PLANS = {
    "in memory": [
        {"name": "Precision", "knobs": {"dtype": "fp16"}},
        {"name": "Accumulate", "knobs": {"pieces": 2}},
        {"name": "Checkpoint", "knobs": {"every": 2}},
    ],
    "streamed": [{"name": "OffloadModel", "knobs": {}}],
}


@pytest.fixture(scope="module", params=PLANS)
def plan(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("job") / "job.py"
    path.write_text(JOB)
    return path


def task(job: Path, folder: Path, plan: str = "in memory", **flags: str) -> TrainTask:
    folder.mkdir(exist_ok=True)
    return train_task(job, STEPS, PLANS[plan], folder, {"steps": 3, "keep": 2}, {"hold": str(folder), **flags})


@pytest.fixture(scope="module")
def undisturbed(job: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return trained(job, tmp_path_factory, "in memory")


@pytest.fixture(scope="module")
def expected(job: Path, plan: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return trained(job, tmp_path_factory, plan)


def trained(job: Path, folders: pytest.TempPathFactory, plan: str) -> str:
    result = run_worker(task(job, folders.mktemp("run"), plan), {})
    assert result.steps == STEPS
    return result.weights_sha256


def killed_at(job: Path, folder: Path, step: int, number: int = signal.SIGKILL, plan: str = "in memory") -> TrainResult:
    """Train until a step was told of, 0 for the beginning, then send the worker a signal. It can't do the step after the next before."""
    pid = 0
    with Gates(folder, step + 1) as gates:

        def look(event: Event) -> None:
            nonlocal pid
            pid = event.pid if isinstance(event, Begun) else pid
            if isinstance(event, Stepped if step else Begun) and event.step == step:
                os.kill(pid, number)
                gates.open(step + 1)

        return run_worker(task(job, folder, plan), {}, look)


def head() -> str:
    """How the code of a launcher begins, so that its workers are started as ours are."""
    return f"import json,sys\nsys.executable = {sys.executable!r}\n"


def gone_on(job: Path, folder: Path, plan: str = "in memory", flag: str = "") -> str:
    return run_worker(task(job, folder, plan, flag=flag), {}).weights_sha256


@pytest.mark.parametrize("step", [0, *(pytest.param(step, marks=pytest.mark.slow) for step in (1, 11)), 23])
def test_killed_in_a_step(step: int, plan: str, job: Path, tmp_path: Path, expected: str) -> None:
    """Step 0 is the first one, before anything was saved."""
    with pytest.raises(Crashed, match="SIGKILL"):
        killed_at(job, tmp_path, step, plan=plan)
    assert gone_on(job, tmp_path, plan) == expected
    assert [event["step"] for event in steps_in(records(tmp_path))] == list(range(1, STEPS + 1))


def test_killed_in_backward_when_a_part_of_the_weights_is_updated(
    plan: str, job: Path, tmp_path: Path, expected: str
) -> None:
    flag = str(tmp_path / "killed")
    with pytest.raises(Crashed, match="SIGKILL"):
        run_worker(task(job, tmp_path / "run", plan, flag=flag), {})
    assert Path(flag).exists()
    assert gone_on(job, tmp_path / "run", plan, flag) == expected


def test_killed_during_a_save(plan: str, job: Path, tmp_path: Path, expected: str) -> None:
    saving, folder = tmp_path / "killed", tmp_path / "run"
    with pytest.raises(Crashed, match="SIGKILL"):
        run_worker(task(job, folder, plan, saving=str(saving)), {})
    assert saving.exists() and len(list(folder.glob("checkpoints/step-00000006.tmp-*"))) == 1
    assert gone_on(job, folder, plan) == expected
    assert not list(folder.glob("checkpoints/step-*.tmp-*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_asked_to_stop_it_saves_first(number: int, job: Path, tmp_path: Path, undisturbed: str) -> None:
    result = killed_at(job, tmp_path, 7, number)
    last = records(tmp_path)[-1]
    assert (
        result.stopped == last["step"] >= 7
        and ("SIGTERM" if number == signal.SIGTERM else "interrupted (Ctrl-C)") in last["text"]
    )
    assert (tmp_path / "checkpoints" / f"step-{last['step']:08}").exists()
    assert gone_on(job, tmp_path) == undisturbed


def test_suspended_and_woken_it_goes_on(job: Path, tmp_path: Path, undisturbed: str) -> None:
    def look(event: Event) -> None:
        if isinstance(event, Stepped) and event.step == 5:
            pid = next(one["pid"] for one in records(tmp_path) if one["event"] == "begun")
            os.kill(pid, signal.SIGSTOP)
            until(lambda: state_of(pid) == "T", "the worker's stop")
            os.kill(pid, signal.SIGCONT)

    assert run_worker(task(job, tmp_path), {}, look).weights_sha256 == undisturbed


def test_a_worker_whose_launcher_is_killed_saves_and_ends(job: Path, tmp_path: Path, undisturbed: str) -> None:
    code = (
        f"{head()}from shoestring.processes.launch import run_worker\nfrom shoestring.processes.task import read_task\n"
        "from shoestring.runs.folder import Lock\nfrom pathlib import Path\n"
        "task = read_task(sys.argv[1])\nrun_worker(task, {}, lock=Lock(Path(task.recording.folder)).file)"
    )
    with Gates(tmp_path, 6):
        launcher = subprocess.Popen(
            [sys.executable, "-c", code, task_text(task(job, tmp_path))], stderr=subprocess.DEVNULL
        )
        until(lambda: len(steps_in(records(tmp_path))) >= 4, "step 4")
        launcher.kill()
        launcher.wait()
    until(lambda: holder(tmp_path) is None, "the worker's end")  # it has the lock as well, until it has saved
    last = records(tmp_path)[-1]
    assert last["event"] == "stopped" and "launcher is gone" in last["text"] and last["step"] < STEPS
    assert gone_on(job, tmp_path) == undisturbed


def test_a_disk_that_is_full_for_a_while_costs_warnings_only(job: Path, tmp_path: Path, undisturbed: str) -> None:
    """No file may grow past 20 kB after step 5 and the first checkpoint, until step 14: events still fit, checkpoints do not."""
    told: list[Event] = []
    pid = 0
    with Gates(tmp_path, 6, 15) as gates:

        def look(event: Event) -> None:
            nonlocal pid
            pid = event.pid if isinstance(event, Begun) else pid
            told.append(event)
            done = {one.step for one in told if isinstance(one, Stepped)}
            for gate, most, ready in (
                (6, 20_000, 5 in done and any(isinstance(one, Saved) for one in told)),
                (15, resource.RLIM_INFINITY, 14 in done),
            ):
                if ready and gate in gates.held:
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
                    gates.open(gate)

        assert run_worker(task(job, tmp_path), {}, look).weights_sha256 == undisturbed
    warned = [event.text for event in told if isinstance(event, Warned)]
    assert 2 <= len(warned) <= 4 and all("training goes on" in text for text in warned)
    steps = [event.step for event in told if isinstance(event, Saved)]
    assert steps[0] == 3 and not {6, 9} & set(steps) and steps[-1] == STEPS
    assert newest_good(tmp_path / "checkpoints")[0] is not None and not list(tmp_path.glob("checkpoints/*.tmp-*"))


@pytest.mark.slow
def test_a_hundred_random_kills(plan: str, job: Path, tmp_path: Path, expected: str) -> None:
    """In every run a few kills at random events, until a hundred are done; each run ends with the same bits."""
    draw = random.Random(0)
    kills = runs = 0
    while kills < 100:
        folder = tmp_path / str(runs)
        runs += 1
        for _ in range(8):
            pid, left = 0, draw.randrange(1, 30)  # events

            def look(event: Event) -> None:
                nonlocal pid, left
                pid = event.pid if isinstance(event, Begun) else pid
                left -= 1
                if not left:
                    os.kill(pid, signal.SIGKILL)

            try:
                run_worker(task(job, folder, plan), {}, look)
                break
            except Crashed:
                kills += 1
        assert gone_on(job, folder, plan) == expected, f"run {runs} after {kills} kills"
