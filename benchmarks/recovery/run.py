"""From the death of a worker to the next step: `shoestring train --devices 3` beside torchrun; writes the table of README.md.

    python benchmarks/recovery/run.py [kills of each worker]

Both train the same model in three processes and save after every step; plain.py is what a careful person writes by hand for torchrun, which
runs with its defaults. One worker is killed with SIGKILL in the middle of training, each in its turn, and both launchers take turns.

    seconds     from the kill to the end of the first step that the group, formed again, has done
    again       steps that were done before the kill and are done again
"""
from __future__ import annotations

import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from shoestring.runs.events import read

HERE = Path(__file__).parent
README = HERE / "README.md"
BEGIN, END = "<!-- written by run.py -->\n", "<!-- end -->\n"
WORKERS, PAUSE, BEFORE, LONGEST = 3, 0.1, 10, 180.0
OURS, THEIRS = "shoestring train --devices 3", "torchrun --max-restarts 3"
PLAN = {"chosen": {"techniques": [{"name": "Average", "knobs": {}}], "peak_bytes": 0, "process_bytes": 0, "step_seconds": PAUSE,
                   "exact": True}}


@dataclass(frozen=True)
class Life:
    """What one forming of a group did: the steps, and when each was done."""

    steps: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Recovery:
    launcher: str
    rank: int
    seconds: float
    again: int


def lives_of_ours(folder: Path) -> list[Life]:
    lives: list[list[tuple[int, float]]] = []
    for event in read(folder / "run")[0]:
        if event["event"] == "begun":
            lives.append([])
        elif event["event"] == "step":
            lives[-1].append((event["step"], event["time"]))
    return [Life(tuple(life)) for life in lives]


def lives_of_theirs(folder: Path) -> list[Life]:
    lives: list[list[tuple[int, float]]] = []
    text = (folder / "steps").read_text() if (folder / "steps").exists() else ""
    for word, when in (line.split() for line in text.splitlines() if len(line.split()) == 2):
        if word == "begun":
            lives.append([])
        else:
            lives[-1].append((int(word), float(when)))
    return [Life(tuple(life)) for life in lives]


def pid_of_ours(launcher: int, folder: Path, rank: int) -> int:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == launcher and f"RANK={rank}".encode() in (process / "environ").read_bytes().split(b"\0"):
                return int(process.name)
        except (OSError, ValueError):
            continue
    raise RuntimeError(f"worker {rank} was not found")


def pid_of_theirs(launcher: int, folder: Path, rank: int) -> int:
    return int((folder / f"pid-{rank}").read_text())


def recovered(name: str, words: list[str], lives: Callable[[Path], list[Life]], pid: Callable[[int, Path, int], int], rank: int,
              folder: Path) -> Recovery:
    """Train, kill a worker, and see how long it takes."""
    with open(folder / "said", "w") as said, subprocess.Popen(words, cwd=folder, stdout=said, stderr=said, start_new_session=True) as launcher:
        try:
            until(lambda: lives(folder) and len(lives(folder)[0].steps) >= BEFORE, launcher, folder)
            before = time.time()
            os.kill(pid(launcher.pid, folder, rank), signal.SIGKILL)
            until(lambda: len(lives(folder)) > 1 and lives(folder)[1].steps, launcher, folder)
        finally:
            os.killpg(launcher.pid, signal.SIGTERM)
            try:
                launcher.wait(60)
            except subprocess.TimeoutExpired:
                launcher.kill()
    first, second = lives(folder)[:2]
    return Recovery(name, rank, second.steps[0][1] - before, first.steps[-1][0] - second.steps[0][0] + 1)


def until(true: Callable[[], object], launcher: subprocess.Popen[bytes], folder: Path) -> None:
    end = time.monotonic() + LONGEST
    while not true():
        if launcher.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"{launcher.args} did not get there:\n{(folder / 'said').read_text()[-2000:]}")
        time.sleep(0.02)


def one(name: str, rank: int) -> Recovery:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if name == OURS:
            (folder / "plan.json").write_text(json.dumps(PLAN))
            words = [sys.executable, "-m", "shoestring", "train", str(HERE / "job.py"), "--plan", "plan.json", "--run", "run",
                     "--devices", str(WORKERS), "--save-every", "1", "--pause", str(PAUSE)]
            return recovered(name, words, lives_of_ours, pid_of_ours, rank, folder)
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(WORKERS), "--max-restarts", "3",
                 "--master-port", str(port), str(HERE / "plain.py"), place, str(PAUSE)]
        return recovered(name, words, lives_of_theirs, pid_of_theirs, rank, folder)


def table(found: list[Recovery], load: float) -> str:
    rows = ["| launcher | worker killed | seconds to the next step | lowest and highest | steps done again |", "|---|---|---|---|---|"]
    for name in (OURS, THEIRS):
        for rank in range(WORKERS):
            own = [one for one in found if one.launcher == name and one.rank == rank]
            times = [one.seconds for one in own]
            rows.append(f"| `{name}` | {rank} | {median(times):.1f} | {min(times):.1f} to {max(times):.1f} | {max(one.again for one in own)} |")
    ours, theirs = (median(one.seconds for one in found if one.launcher == name) for name in (OURS, THEIRS))
    busy = f"\n**The machine was busy with other work (load average {load:.1f}): these times say little.**\n" if load > 0.5 else ""
    return (f"\n{WORKERS} workers, {len(found) // (2 * WORKERS)} kills of each under each launcher. {platform.machine()}, {os.cpu_count()} cores, "
            f"torch {torch.__version__}; load average before the run {load:.1f}.\n{busy}\n" + "\n".join(rows)
            + f"\n\nAltogether {ours:.1f} s beside {theirs:.1f} s; the target, below 8 s, is {'met' if ours < 8 else 'missed'}.\n\n")


def main() -> None:
    kills, load = int(sys.argv[1]) if len(sys.argv) > 1 else 3, os.getloadavg()[0]
    found = []
    for _ in range(kills):
        for rank in range(WORKERS):
            for name in (OURS, THEIRS):
                found.append(one(name, rank))
                print(f"{name}: worker {rank} killed, {found[-1].seconds:.1f} s, {found[-1].again} steps again", file=sys.stderr)
    text = README.read_text()
    head, rest = text.split(BEGIN)
    README.write_text(head + BEGIN + table(found, load) + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
