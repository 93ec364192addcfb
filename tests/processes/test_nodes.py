"""Two machines, simulated by network namespaces, whose cable is cut: both notice, one goes on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import HUNG, PASS_GATE, Gates, until

JOB = (
    PASS_GATE
    + """
import itertools
import torch
from torch import nn
from shoestring import Job

def data():
    for number in itertools.count(1):
        pass_gate(".", number)
        x = torch.randn(8, 16)
        yield x, x[:, :4].argmax(1)

def job(steps: int = 200) -> Job:
    return Job(model=lambda: nn.Linear(16, 4), data=data, steps=steps)
"""
)
PLAN = {
    "shoestring": 3,
    "chosen": {
        "techniques": [{"name": "DataParallel", "knobs": {}}],
        "peak_bytes": 1 << 20,
        "process_bytes": 1 << 29,
        "step_seconds": 0.1,
        "exactness": "to rounding",
        "details": {"world": 2},
    },
}
PATIENCE = 6  # seconds


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def machines() -> Iterator[tuple[str, str]]:
    """Two namespaces with a cable between them; the first has the address 10.77.0.1."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need iproute2 and root")
    names = f"shoe{os.getpid()}a", f"shoe{os.getpid()}b"
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "cable0", "netns", names[0], "type", "veth", "peer", "name", "cable0", "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "cable0")
            ip("-n", name, "link", "set", "cable0", "up")
            ip("-n", name, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not permitted here: {error.stderr.decode().strip()}")
    try:
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.slow
def test_a_cable_that_is_cut_is_noticed_on_both_sides_and_one_goes_on(
    machines: tuple[str, str], tmp_path: Path
) -> None:
    (tmp_path / "small.py").write_text(JOB)
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    events_file, gates = tmp_path / "a" / "events.jsonl", Gates(tmp_path, 16)
    nodes = [
        subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                name,
                sys.executable,
                "-m",
                "shoestring",
                "train",
                "small.py",
                "--plan",
                "plan.json",
                "--run",
                "a",
                "--save-every",
                "5",
                "--patience",
                f"{PATIENCE}s",
                "--nodes",
                f"10.77.0.1:29777,{number}/2",
            ],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number, name in enumerate(machines)
    ]
    try:
        until(lambda: events_file.exists() and events_file.read_text().count('"event":"step"') > 12, "step 13")
        ip("-n", machines[0], "link", "set", "cable0", "down")
        gates.open(16)
        left, _ = nodes[1].communicate(timeout=HUNG)
        assert nodes[1].returncode == 2 and "node 0 at 10.77.0.1:29777, which leads the group, is gone" in left, left
        gone_on, _ = nodes[0].communicate(timeout=HUNG)
        assert nodes[0].returncode == 0 and "node 1 of 2 is gone" in gone_on, gone_on
    finally:
        for node in nodes:
            node.kill()
    events = [json.loads(line) for line in events_file.read_text().splitlines()]
    assert [event.get("world", 1) for event in events if event["event"] == "begun"] == [2, 1]
    assert events[-1] == events[-1] | {"event": "finished", "step": 200}
