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
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shoestring.processes.launch import run_worker
from shoestring.processes.messages import Crashed
from shoestring.processes.tasks import TrainResult, TrainTask, written_task
from shoestring.runs.checkpoints import newest_good
from shoestring.runs.event import Begun, Event, Saved, Stepped, Warned
from shoestring.runs.folder import holder
from tests.records import records, steps_in
from tests.tasks import train_task

pytestmark = pytest.mark.usefixtures("warm_workers")

STEPS = 24
JOB = """
import os, random, signal, time
import numpy, torch
from torch import nn
from shoestring import Job

def data(pause):
    while True:
        time.sleep(pause)
        x = torch.randn(16, 64) + random.random() + float(numpy.random.rand())   # all three generators
        yield {"x": x, "y": x[:, :10].argmax(1)}

class Deadly(nn.Module):   # kills its process in backward, once
    def __init__(self, flag): super().__init__(); self.flag, self.calls = flag, 0

    def forward(self, x):
        self.calls += 1
        if self.flag and self.calls == 8 and not os.path.exists(self.flag):
            x.register_hook(lambda gradient: (open(self.flag, "w"), os.kill(os.getpid(), signal.SIGKILL)) and None)
        return x

def job(pause: float = 0.02, steps: int = 24, flag: str = "") -> Job:
    block = lambda: nn.Sequential(nn.Linear(64, 260), nn.GELU(), nn.Dropout(0.2), nn.Linear(260, 64))
    return Job(model=lambda: nn.Sequential(block(), block(), Deadly(flag), block(), block(), block(), nn.Linear(64, 10)),
               data=lambda: data(pause), forward=lambda model, batch: model(batch["x"]), steps=steps,
               loss=lambda output, batch: nn.functional.cross_entropy(output.float(), batch["y"]))
"""
PLANS = {
    "in memory": [{"name": "Precision", "knobs": {"dtype": "fp16"}}, {"name": "Accumulate", "knobs": {"pieces": 2}},
                  {"name": "Checkpoint", "knobs": {"every": 2}}],
    "streamed": [{"name": "Stream", "knobs": {}}],
}


@pytest.fixture(scope="module", params=PLANS)
def plan(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("job") / "job.py"
    path.write_text(JOB)
    return path


def task(job: Path, folder: Path, pause: float = 0.02, plan: str = "in memory", flag: str = "") -> TrainTask:
    folder.mkdir(exist_ok=True)
    return train_task(job, STEPS, PLANS[plan], folder, {"steps": 3, "keep": 2}, {"pause": pause, "flag": flag})


@pytest.fixture(scope="module")
def undisturbed(job: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return trained(job, tmp_path_factory, "in memory")


@pytest.fixture(scope="module")
def expected(job: Path, plan: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return trained(job, tmp_path_factory, plan)


def trained(job: Path, folders: pytest.TempPathFactory, plan: str) -> str:
    result = run_worker(task(job, folders.mktemp("run"), 0.0, plan), {})
    assert result.steps == STEPS
    return result.weights_sha256


def killed_at(job: Path, folder: Path, moment: Callable[[Event], bool], number: int = signal.SIGKILL,
              plan: str = "in memory") -> TrainResult:
    """Train until `moment` is true of an event, then send the worker a signal."""
    pid = 0

    def look(event: Event) -> None:
        nonlocal pid
        pid = event.pid if isinstance(event, Begun) else pid
        if pid and moment(event):
            os.kill(pid, number)
            pid = 0

    return run_worker(task(job, folder, plan=plan), {}, look)


def head() -> str:
    """How the code of a launcher begins, so that its workers are started as ours are."""
    return f"import json,sys\nsys.executable = {sys.executable!r}\n"


def gone_on(job: Path, folder: Path, plan: str = "in memory", flag: str = "") -> str:
    return run_worker(task(job, folder, 0.0, plan, flag), {}).weights_sha256


@pytest.mark.parametrize("step", [0, *(pytest.param(step, marks=pytest.mark.slow) for step in (1, 11)), 23])
def test_killed_in_a_step(step: int, plan: str, job: Path, tmp_path: Path, expected: str) -> None:
    """Step 0 is the first one, before anything was saved."""
    with pytest.raises(Crashed, match="SIGKILL"):
        killed_at(job, tmp_path, lambda event: isinstance(event, Stepped if step else Begun) and event.step == step, plan=plan)
    assert gone_on(job, tmp_path, plan) == expected
    assert [event["step"] for event in steps_in(records(tmp_path))] == list(range(1, STEPS + 1))


def test_killed_in_backward_when_a_part_of_the_weights_is_updated(plan: str, job: Path, tmp_path: Path, expected: str) -> None:
    flag = str(tmp_path / "killed")
    with pytest.raises(Crashed, match="SIGKILL"):
        run_worker(task(job, tmp_path / "run", plan=plan, flag=flag), {})
    assert Path(flag).exists()
    assert gone_on(job, tmp_path / "run", plan, flag) == expected


def test_killed_during_a_save(plan: str, job: Path, tmp_path: Path, expected: str) -> None:
    code = head() + ("from shoestring.processes.launch import run_worker\nfrom shoestring.processes.tasks import read_task\n"
                     "run_worker(read_task(sys.argv[1]), {})")
    child = subprocess.Popen([sys.executable, "-c", code, written_task(task(job, tmp_path, plan=plan))], stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while not list(tmp_path.glob("checkpoints/step-*.tmp-*")) and time.monotonic() < until:
        time.sleep(0.0005)
    pid = next(event["pid"] for event in records(tmp_path) if event["event"] == "begun")
    os.kill(pid, signal.SIGKILL)
    child.wait(60)
    assert gone_on(job, tmp_path, plan) == expected
    assert not list(tmp_path.glob("checkpoints/step-*.tmp-*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_asked_to_stop_it_saves_first(number: int, job: Path, tmp_path: Path, undisturbed: str) -> None:
    result = killed_at(job, tmp_path, lambda event: isinstance(event, Stepped) and event.step == 7, number)
    last = records(tmp_path)[-1]
    assert result.stopped == last["step"] >= 7 and ("SIGTERM" if number == signal.SIGTERM else "interrupted (Ctrl-C)") in last["text"]
    assert (tmp_path / "checkpoints" / f"step-{last['step']:08}").exists()
    assert gone_on(job, tmp_path) == undisturbed


def test_suspended_and_woken_it_goes_on(job: Path, tmp_path: Path, undisturbed: str) -> None:
    """SIGSTOP, and SIGCONT from somebody else a moment later."""
    waker: list[subprocess.Popen[bytes]] = []

    def look(event: Event) -> None:
        if isinstance(event, Stepped) and event.step == 5:
            pid = next(one["pid"] for one in records(tmp_path) if one["event"] == "begun")
            os.kill(pid, signal.SIGSTOP)
            waker.append(subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -CONT {pid}"]))

    assert run_worker(task(job, tmp_path), {}, look).weights_sha256 == undisturbed
    assert waker and waker[0].wait() == 0


def test_a_worker_whose_launcher_is_killed_saves_and_ends(job: Path, tmp_path: Path, undisturbed: str) -> None:
    code = (f"{head()}from shoestring.processes.launch import run_worker\nfrom shoestring.processes.tasks import read_task\n"
            "from shoestring.runs.folder import Lock\nfrom pathlib import Path\n"
            "task = read_task(sys.argv[1])\nrun_worker(task, {}, lock=Lock(Path(task.recording.folder)).file)")
    launcher = subprocess.Popen([sys.executable, "-c", code, written_task(task(job, tmp_path, 0.1))], stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while len(steps_in(records(tmp_path))) < 4 and time.monotonic() < until:
        time.sleep(0.01)
    launcher.kill()
    launcher.wait()
    while holder(tmp_path) is not None and time.monotonic() < until:   # the worker has the lock as well, until it has saved
        time.sleep(0.01)
    last = records(tmp_path)[-1]
    assert last["event"] == "stopped" and "launcher is gone" in last["text"] and last["step"] < STEPS
    assert gone_on(job, tmp_path) == undisturbed


def test_a_disk_that_is_full_for_a_while_costs_warnings_only(job: Path, tmp_path: Path, undisturbed: str) -> None:
    """No file may grow past 20 kB between steps 5 and 14: events still fit, checkpoints do not."""
    told: list[Event] = []
    pid = 0

    def look(event: Event) -> None:
        nonlocal pid
        pid = event.pid if isinstance(event, Begun) else pid
        told.append(event)
        if isinstance(event, Stepped) and event.step in (5, 14):
            most = 20_000 if event.step == 5 else resource.RLIM_INFINITY
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))

    assert run_worker(task(job, tmp_path), {}, look).weights_sha256 == undisturbed
    warned = [event.text for event in told if isinstance(event, Warned)]
    assert 2 <= len(warned) <= 4 and all("training goes on" in text for text in warned)
    steps = [event.step for event in told if isinstance(event, Saved)]
    assert steps[0] == 3 and not {6, 9} & set(steps) and steps[-1] == STEPS
    assert newest_good(tmp_path / "checkpoints")[0] is not None and not list(tmp_path.glob("checkpoints/*.tmp-*"))


@pytest.mark.slow
def test_a_hundred_random_kills(plan: str, job: Path, tmp_path: Path, expected: str) -> None:
    """In every run a few kills at random times, until a hundred are done; each run ends with the same bits."""
    draw = random.Random(0)
    kills = runs = 0
    while kills < 100:
        folder = tmp_path / str(runs)
        runs += 1
        for _ in range(8):
            after = draw.uniform(0.0, 0.6)
            when: list[float] = []

            def look(event: Event, after: float = after, when: list[float] = when) -> None:
                when.append(time.monotonic())
                if isinstance(event, Begun):
                    subprocess.Popen(["sh", "-c", f"sleep {after}; kill -9 {event.pid}"], stderr=subprocess.DEVNULL)

            try:
                run_worker(task(job, folder, plan=plan), {}, look)
                break
            except Crashed:
                kills += 1
        assert gone_on(job, folder, plan) == expected, f"run {runs} after {kills} kills"
