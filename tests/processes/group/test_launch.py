"""Groups of workers, as they are killed, suspended, mistaken and alone: they go on, or say once why they can't."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from shoestring.core.errors import Crashed, Mistake
from shoestring.processes.group.channel import Receiver
from shoestring.processes.group.launch import run_group
from shoestring.processes.group.rendezvous import Rendezvous
from shoestring.processes.group.worker import says_peer_lost, wait_for_all
from shoestring.processes.messages import OutOfMemory
from shoestring.processes.nodes import Nodes, Team, parse_nodes, surrounding_nodes
from shoestring.runs.events.event import Died, Event, Stepped
from shoestring.runs.folder import holder
from shoestring.training.execution.tasks import TrainTask
from tests.records import records, steps_in
from tests.tasks import train_task
from tests.waiting import HUNG, PASS_GATE, Gates, free_port, until, until_gone

pytestmark = pytest.mark.usefixtures("warm_workers")

STEPS = 24
ENDLESS = 1_000_000  # steps: more than are ever done
JOB = (
    PASS_GATE
    + """
import itertools, os, signal
import torch
from torch import nn
from shoestring import Job

RANK = int(os.environ.get("RANK", 0))

class Net(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.inner, self.head, self.fault, self.seen = nn.Linear(32, 32), nn.Linear(32, 4), fault, 0
    def forward(self, x):
        self.seen += 1
        if self.fault == "memory" and RANK == 1 and self.seen > 4:
            torch.empty(1 << 60)
        if self.fault == "dies" and RANK == 1 and self.seen > 2:
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.fault == "wrong" and self.seen > 4:
            raise KeyError("no such thing")
        return self.head(torch.relu(self.inner(x)))

def data(hold):
    for number in itertools.count(1):
        pass_gate(hold, number)
        x = torch.randn(12, 32)
        yield x, x[:, :4].argmax(1)

def job(steps: int = 24, hold: str = "", fault: str = "") -> Job:
    if fault == "import" and RANK == 1:
        import nothing_of_that_name
    return Job(model=lambda: Net(fault), data=lambda: data(hold), steps=steps)
"""
)
PLAN = {
    "shoestring": 3,
    "chosen": {
        "techniques": [{"name": "DataParallel", "knobs": {"linear": False, "warmup": 0}}],
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


def task(place: Path, run: str = "run", every: int = 3, **flags: Any) -> TrainTask:
    folder = place / run
    folder.mkdir(exist_ok=True)
    return train_task(
        place / "small.py", STEPS, PLAN["chosen"]["techniques"], folder, {"steps": every, "keep": 2}, flags
    )  # type: ignore[arg-type]


def members(launcher: int) -> dict[int, int]:
    """The workers of a launcher: their pids by rank."""
    parents, names = {}, {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it is gone
            parents[int(process.name)] = int((process / "stat").read_text().rsplit(")", 1)[1].split()[1])
            names[int(process.name)] = (process / "comm").read_text().split()

    def ancestors(pid: int) -> Iterator[int]:  # a server that a warm Python made stands between them
        while pid := parents.get(pid, 0):
            yield pid

    return {
        int(name[1]): pid
        for pid, name in names.items()
        if name[0] == "shoestring" and len(name) == 2 and launcher in ancestors(pid)
    }


def at_step(step: int, act: Callable[[], object]) -> Callable[[Event], None]:
    """Do something once, when a step is done."""
    left = [act]

    def look(event: Event) -> None:
        if isinstance(event, Stepped) and event.step >= step and left:
            left.pop()()

    return look


def test_each_worker_in_turn_is_killed_and_the_group_goes_on_with_the_same_bits(place: Path) -> None:
    # Right after a save, and the group waits before the next one: whoever is killed has steps to do again.
    with Gates(place, 10, 16, 22) as gates:

        def kill(rank: int, gate: int) -> None:
            os.kill(members(os.getpid())[rank], signal.SIGKILL)
            gates.open(gate)

        killed = [at_step(step, partial(kill, rank, step + 3)) for rank, step in enumerate((7, 13, 19))]
        result = run_group(
            task(place, every=6, hold=str(place)), {}, Team(3), lambda event: [look(event) for look in killed] and None
        )
    assert result.steps == STEPS and result.world == 3 and result.restarts == 3
    events = records(place / "run")
    deaths = [event for event in events if event["event"] == "died"]
    assert [event["rank"] for event in deaths] == [0, 1, 2] and all(event["why"] == "SIGKILL" for event in deaths)
    assert all("go on from step" in event["text"] for event in deaths)
    formed = [event for event in events if event["event"] == "re-formed"]
    assert [event["world"] for event in formed] == [3, 3, 3] and len(result.recovery_seconds) == 3
    assert all(one["seconds"] <= took for one, took in zip(formed, result.recovery_seconds, strict=True))
    done = [(event["step"], event["loss"]) for event in events if event["event"] == "step"]
    assert len(done) > STEPS and len(set(done)) == STEPS, "steps that were done again lost the same"
    undisturbed = run_group(task(place, "undisturbed"), {}, Team(3))
    assert undisturbed.restarts == 0 and result.weights_sha256 == undisturbed.weights_sha256
    assert not members(os.getpid())


class LifeClock:
    """A second passes with every sign of life of one worker, from when it is started until a death is told of: so another one is silent for
    a time that the test knows, and no machine is too busy."""

    def __init__(self, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.runs = 0.0, False
        received = Receiver.receive

        def counted(receiver: Receiver) -> Iterator[tuple[int, Any]]:
            for found in received(receiver):
                self.now += self.runs and found[0] == rank
                yield found

        monkeypatch.setattr(Receiver, "receive", counted)

    def __call__(self) -> float:
        return self.now


def suspended_at(step: int, rank: int, clock: LifeClock) -> Callable[[Event], None]:
    """Suspend a worker once, when a step is done; the clock runs until it is missed."""

    def suspend() -> None:
        os.kill(members(os.getpid())[rank], signal.SIGSTOP)
        clock.runs = True

    suspends = at_step(step, suspend)

    def look(event: Event) -> None:
        suspends(event)
        clock.runs = clock.runs and not isinstance(event, Died)

    return look


def test_a_suspended_worker_is_missed_named_and_replaced(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = LifeClock(0, monkeypatch)
    with Gates(place, 10) as gates:
        suspend = suspended_at(7, 1, clock)

        def look(event: Event) -> None:
            suspend(event)
            if clock.runs and gates.held:
                gates.open(10)

        result = run_group(task(place, hold=str(place)), {}, Team(2, patience=3.0), look, clock=clock)
    died = next(event for event in records(place / "run") if event["event"] == "died")
    assert died["rank"] == 1 and died["why"].startswith("no sign of life for ")
    assert result.restarts == 1 and result.steps == STEPS and not members(os.getpid())


@pytest.mark.parametrize(
    ("fault", "kind", "said"),
    [
        ("import", Mistake, "worker 1 of 2: .*nothing_of_that_name"),
        ("memory", OutOfMemory, "worker 1 of 2: memory ran out"),
    ],
)
def test_what_would_come_again_ends_the_group_at_once(
    fault: str, kind: type[Exception], said: str, place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(kind, match=said):
        run_group(task(place, fault=fault), {}, Team(2))
    events = [event["event"] for event in records(place / "run")]
    assert events.count("failed") == 1 and not {"died", "re-formed"} & set(events)
    assert "Traceback" not in capfd.readouterr().err and not members(os.getpid())


def test_a_worker_that_dies_again_and_again_is_given_up(place: Path) -> None:
    with pytest.raises(
        Crashed,
        match=r"worker 1 died \(SIGSEGV\), and in 3 tries no new step was done after step 2: a native library "
        r"crashed; there is no checkpoint yet",
    ):
        run_group(task(place, fault="dies"), {}, Team(2))
    assert [event["event"] for event in records(place / "run")].count("died") == 3


def shoestring(place: Path, *words: object) -> list[str]:
    return [
        sys.executable,
        "-m",
        "shoestring",
        "train",
        "small.py",
        "--plan",
        "saved.json",
        "--run",
        "a",
        *map(str, words),
    ]


def begun(place: Path, *words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        shoestring(place, *words), cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def steps_done(run: Path) -> int:
    done = steps_in(records(run))
    return done[-1]["step"] if done else 0


def test_a_mistake_in_the_job_is_told_once(place: Path) -> None:
    done = subprocess.run(
        shoestring(place, "--devices", 2, "--fault", "wrong"), cwd=place, capture_output=True, text=True, timeout=HUNG
    )
    assert done.returncode == 2 and done.stderr.count("no such thing") == 1, done.stderr
    assert "small.py line" in done.stderr and "Traceback" not in done.stderr and "died" not in done.stderr
    assert [event["event"] for event in records(place / "a")].count("failed") == 1


def test_workers_end_with_their_launcher_and_ctrl_c_saves(place: Path) -> None:
    words = ("--devices", 2, "--hold", place, "--steps", ENDLESS, "--save-every", 4)
    with Gates(place, 9):
        first = begun(place, *words)
        until(lambda: steps_done(place / "a") >= 6)
        workers = members(os.getpid()).values()
        assert len(workers) == 2
        first.kill()
        for pid in workers:
            until_gone(pid)
        first.communicate()
    until(lambda: holder(place / "a") is None)

    with Gates(place, 13) as gates:
        second = begun(place, *words)
        until(
            lambda: (
                steps_done(place / "a") >= 10 and sum(event["event"] == "begun" for event in records(place / "a")) == 2
            )
        )
        second.send_signal(signal.SIGINT)
        gates.open(13)
        _, said = second.communicate(timeout=HUNG)
    last = records(place / "a")[-1]
    assert second.returncode == 130 and "the same command goes on from there" in said and "Traceback" not in said, said
    assert last["event"] == "stopped" and (place / "a" / "checkpoints" / f"step-{last['step']:08}").exists()
    assert next(event["step"] for event in records(place / "a")[::-1] if event["event"] == "begun") >= 4


@pytest.mark.slow
def test_a_machine_that_is_lost_is_gone_on_without_and_may_come_back(place: Path) -> None:
    at = f"127.0.0.1:{free_port()}"
    words = ("--steps", ENDLESS, "--save-every", 400)
    first, second = begun(place, "--nodes", f"{at},0/2", *words), begun(place, "--nodes", f"{at},1/2", *words)
    until(lambda: steps_done(place / "a") >= 6)
    second.kill()
    second.communicate()
    until(lambda: worlds(place / "a") == [2, 1])  # who comes back before that is waited for
    third = begun(place, "--nodes", f"{at},1/2", *words)
    until(lambda: worlds(place / "a") == [2, 1, 2])
    formed = steps_done(place / "a")
    until(lambda: steps_done(place / "a") > formed)
    third.send_signal(signal.SIGINT)  # who does not lead asks who does
    for launcher in (first, third):
        _, said = launcher.communicate(timeout=HUNG)
        assert launcher.returncode == 130 and "Traceback" not in said, said
    events = records(place / "a")
    assert events[-1]["event"] == "stopped" and [
        event["world"] for event in events if event["event"] == "re-formed"
    ] == [1, 2]
    assert sum("node 1 of 2 is gone" in event.get("text", "") for event in events) == 1
    assert [event["step"] for event in steps_in(events)] == list(range(1, events[-1]["step"] + 1))


def worlds(run: Path) -> list[int]:
    return [event.get("world", 1) for event in records(run) if event["event"] == "begun"]


@pytest.mark.slow
def test_a_machine_with_another_job_is_refused_on_both(place: Path) -> None:
    at = f"127.0.0.1:{free_port()}"
    first = begun(place, "--nodes", f"{at},0/2")
    until((place / "a" / "run.json").exists)
    (place / "small.py").write_text(JOB + "\n# changed\n")
    second = begun(place, "--nodes", f"{at},1/2")
    for launcher in (second, first):
        _, said = launcher.communicate(timeout=HUNG)
        assert launcher.returncode == 2 and "the job file small.py is not the one" in said and "node 1 of 2" in said, (
            said
        )
        assert "Traceback" not in said


@pytest.mark.slow
def test_inside_torchrun_every_process_is_a_worker(place: Path) -> None:
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
        "-m",
        "--",
        *shoestring(place, "--json")[2:],
    ]
    done = subprocess.run(words, cwd=place, capture_output=True, text=True, timeout=HUNG)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)  # one of them prints
    assert report["world"] == 2 and report["steps"] == STEPS


def test_a_port_in_use_and_a_machine_that_does_not_come_are_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Mistake, match=f"port {port} is in use here.*take another one"):
            Rendezvous(Nodes("127.0.0.1", port, 0, 2))
    missing = r"node 1 of 3 did not come to 127.0.0.1:\d+ within 200 ms: give the same command there"
    with (
        pytest.raises(Mistake, match=missing),
        Rendezvous(Nodes("127.0.0.1", free_port(), 0, 3), come=0.2) as rendezvous,
    ):
        rendezvous.next_rendezvous()
    with pytest.raises(Mistake, match=r"node 0 of 2 could not be reached at 127\.0\.0\.1:"):
        Rendezvous(Nodes("127.0.0.1", free_port(), 1, 2), come=0.2)


def test_a_worker_that_does_not_join_is_named() -> None:
    store = HashStore()
    store.set("here/0", "")
    store.set("here/2", "")
    with pytest.raises(Mistake, match="worker 1 of 3 did not join within 0 s"):
        wait_for_all(store, 3, 0.2)


def test_losing_another_worker_is_nobodys_mistake() -> None:
    assert says_peer_lost(
        RuntimeError("[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:31882")
    )
    try:
        try:
            raise RuntimeError(
                "[/x/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation to complete"
            )
        except RuntimeError as error:
            raise ValueError("wrapped by somebody") from error
    except ValueError as error:
        assert says_peer_lost(error)
    assert not says_peer_lost(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_the_machines_are_read_from_what_the_user_or_a_scheduler_says() -> None:
    assert parse_nodes("a.b:29400,1/2") == Nodes("a.b", 29400, 1, 2)
    torchrun = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "7", "LOCAL_RANK": "1"}
    assert surrounding_nodes(torchrun | {"TORCHELASTIC_USE_AGENT_STORE": "True"}) == Nodes(
        "h", 7, 1, 4, torchrun=True, device=1
    )
    slurm = {
        "SLURM_PROCID": "2",
        "SLURM_NTASKS": "4",
        "SLURM_JOB_NODELIST": "gpu[07-09],b",
        "SLURM_JOB_ID": "20003",
        "SLURM_LOCALID": "0",
    }
    assert surrounding_nodes(slurm) == Nodes("gpu07", 20003, 2, 4, device=0)
    assert (
        surrounding_nodes({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"}) is None
    )  # a script of one process
    assert surrounding_nodes({}) is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--devices", "0"], "training needs at least one"),
        (["--patience", "soon"], "'soon' is not a time"),
        (["--patience", "1s"], "take 2s or more"),
        (["--restarts", "-1"], "take 0 to end at the first death"),
        (["--nodes", "10.0.0.1,0/2"], "write host:port,rank/of"),
        (["--nodes", "10.0.0.1:29400,2/2"], "there is no machine 2 of 2"),
        (["--nodes", "10.0.0.1:99999,0/2"], "99999 is no port"),
    ],
)
def test_a_mistake_about_groups_is_told_before_anything_is_written(words: list[str], said: str, place: Path) -> None:
    before = sorted(place.iterdir())
    done = subprocess.run(shoestring(place, *words), cwd=place, capture_output=True, text=True, timeout=HUNG)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert sorted(place.iterdir()) == before
