"""A compression that is killed goes on to the same model, one process at a time has its folder, and it is watched while it runs."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shoestring
from shoestring.commands.main import run
from shoestring.compression.distillation import heal
from shoestring.core.errors import Mistake
from shoestring.show.watch.follow import Watch
from tests.waiting import HUNG, state_of, until

JOB = """
import torch
from torch import nn
from shoestring import Job

def job(width: int = 64) -> Job:
    draw = torch.Generator().manual_seed(0)
    data = [(torch.randn(8, 32, generator=draw), torch.randint(0, 5, (8,), generator=draw)) for _ in range(24)]
    return Job(model=lambda: nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 5)), data=lambda: data, steps=2)
"""
# A moment is a call of a model, or something that is about to reach the disk; at the one that is asked for, the signal comes.
CHILD = """# warm
import os, sys
import torch
from shoestring.commands.main import run
from shoestring.compression.calibration import latency

latency.ENOUGH, latency.LEAST = 0.0, 3
moment, number, *words = sys.argv[1:]
print(os.getpid(), file=sys.stderr, flush=True)   # who waits for this process has a program in front of it
passed, fsync = 0, os.fsync

def pass_moment(*given):
    global passed
    passed += 1
    if passed == int(moment):
        os.kill(os.getpid(), int(number))

def synced(file):
    pass_moment()
    fsync(file)

torch.nn.modules.module.register_module_forward_hook(lambda *given: pass_moment())
os.fsync = synced
code = run(words)
print(passed, file=sys.stderr)
sys.exit(code)
"""
SIZE = "4KB"
pytestmark = pytest.mark.usefixtures("warm_workers")


def child(place: Path, name: str, moment: int, sent: signal.Signals = signal.SIGKILL) -> subprocess.Popen[str]:
    words = ["compress", "net.py", "--size", SIZE, "--samples", "32", "--out", name, "--json"]
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(moment), str(int(sent)), *words],
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def told(process: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
    out, said = process.communicate(timeout=HUNG)
    assert process.returncode == 0, said
    return json.loads(out), said


def state(place: Path, name: str) -> str:
    """What the watch page says of a run."""
    followed = Watch([place]).runs[name]
    followed.look(0.0)
    return followed.state


def killed_and_gone_on(place: Path, kills: int) -> None:
    (place / "net.py").write_text(JOB)
    whole, said = told(child(place, "whole", 0))
    moments = int(said.splitlines()[-1])
    draw = random.Random(0)
    for _ in range(kills):
        process = child(place, "small", draw.randrange(1, moments + 1))
        process.communicate(timeout=HUNG)
        if process.returncode == 0:  # it was finished before: the last moments are after its report
            assert state(place, "small") == "finished"
            continue
        assert process.returncode == -signal.SIGKILL
        if (place / "small" / "run.json").exists():
            assert state(place, "small") in ("died", "finished")
    small, _ = told(child(place, "small", 0))
    for name in ("model.safetensors", "manifest.json", "job.py"):
        assert (place / "small" / name).read_bytes() == (place / "whole" / name).read_bytes()
    measured = {"fidelity", "size_bytes", "techniques", "layers", "metric", "asked", "missed"}
    assert {name: small[name] for name in measured} == {name: whole[name] for name in measured}
    assert not list((place / "small").glob("*.tmp-*")) and state(place, "small") == "finished"


def test_a_killed_compression_goes_on_to_the_same_model(tmp_path: Path) -> None:
    killed_and_gone_on(tmp_path, 3)


@pytest.mark.slow
def test_a_compression_that_is_killed_twenty_times_goes_on_to_the_same_model(tmp_path: Path) -> None:
    killed_and_gone_on(tmp_path, 20)


def test_of_two_in_one_folder_one_is_refused_and_the_other_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    first = child(tmp_path, "small", 40, signal.SIGSTOP)
    assert first.stderr is not None, "the pipe was asked for"
    pid = int(first.stderr.readline())
    until(lambda: state_of(pid) == "T", "the moment at which it stands")
    words = ["compress", "net.py", "--samples", "32", "--out", "small"]
    assert run([*words, "--size", SIZE]) == 2
    assert f"small is in use by process {pid}" in capsys.readouterr().err
    assert state(tmp_path, "small") in ("planning", "running")
    os.kill(pid, signal.SIGCONT)
    report, _ = told(first)
    followed = Watch([tmp_path]).runs["small"]
    followed.look(0.0)
    assert "Layer by layer" in followed.view.content and "The frontier" in followed.view.content
    assert {one.column for one in followed.summary.of_room} == {"Size", "Fidelity"}
    assert run([*words, "--size", SIZE, "--json"]) == 0
    again = capsys.readouterr()
    assert json.loads(again.out) == report and "is there" not in again.err, "what is finished is reported"
    assert run([*words, "--size", "5KB"]) == 2
    assert "--size changed: 4.00 kB before, now 5.00 kB. --fresh begins anew" in capsys.readouterr().err
    assert run([*words, "--size", "5KB", "--fresh", "--json"]) == 0 and len(list(tmp_path.glob("small-before-*"))) == 1


def test_a_script_goes_on_and_has_a_finished_model_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(JOB)
    first = shoestring.compress(str(tmp_path / "net.py"), tmp_path / "small", size=SIZE, samples=32)
    written = (tmp_path / "small" / "model.safetensors").stat().st_mtime_ns
    again = shoestring.compress(str(tmp_path / "net.py"), tmp_path / "small", size=SIZE, samples=32)
    assert again.report["size_bytes"] == first.report["size_bytes"]
    assert (tmp_path / "small" / "model.safetensors").stat().st_mtime_ns == written
    with pytest.raises(Mistake, match="width changed: 64 before, now 32"):
        shoestring.compress(str(tmp_path / "net.py"), tmp_path / "small", size=SIZE, samples=32, width=32)


def test_a_script_heals_what_two_bits_broke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heal, "steps_in", lambda job, seconds, clock: 40)
    (tmp_path / "net.py").write_text(JOB)
    small = shoestring.compress(
        str(tmp_path / "net.py"), tmp_path / "small", use=["Quantize(bits=2)"], heal="1s", samples=32
    )
    healed = small.report["healed"]
    assert healed["steps"] == 40 and healed["after"] > healed["before"]
    assert state(tmp_path / "small-healing", "run") == "finished"
