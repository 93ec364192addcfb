"""From the death of a worker to the next step: `shoestring train --devices 3` beside torchrun; writes the table of README.md.

    python benchmarks/recovery/run.py [kills of each worker]

All train the same model in three processes and save after every step; plain.py is what a careful person writes by hand for torchrun. One
worker is killed with SIGKILL in the middle of training, each in its turn, and the launchers take turns.

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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from shoestring.runs.events.event import Begun, Stepped
from shoestring.runs.events.event_log import read

HERE = Path(__file__).parent
README = HERE / "README.md"
BEGIN, END = "<!-- written by run.py -->\n", "<!-- end -->\n"
WORKERS, PAUSE, BEFORE, LONGEST = 3, 0.1, 10, 60.0
OURS, THEIRS = "shoestring train --devices 3", "torchrun --nproc-per-node 3 --max-restarts 3"
MENDED = f"TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 {THEIRS} --standalone"
LAUNCHERS = (OURS, THEIRS, MENDED)
PLAN = {
    "shoestring": 3,
    "chosen": {
        "techniques": [{"name": "DataParallel", "knobs": {}}],
        "peak_bytes": 0,
        "process_bytes": 0,
        "step_seconds": PAUSE,
        "exactness": "to rounding",
    },
}


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
    for event in read(folder / "run").events:
        if isinstance(event, Begun):
            lives.append([])
        elif isinstance(event, Stepped):
            lives[-1].append((event.step, event.time))
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
    """Ours are called by their rank, and are grandchildren of the launcher."""
    parents, names = {}, {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it is gone
            parents[int(process.name)] = int((process / "stat").read_text().rsplit(")", 1)[1].split()[1])
            names[int(process.name)] = (process / "comm").read_text().strip()
    return next(
        pid for pid, name in names.items() if name == f"shoestring {rank}" and parents.get(parents[pid]) == launcher
    )


def pid_of_theirs(launcher: int, folder: Path, rank: int) -> int:
    return int((folder / f"pid-{rank}").read_text())


def recovered(name: str, words: list[str], rank: int, folder: Path) -> Recovery:
    """Train, kill a worker, and see how long it takes."""
    lives, pid = (lives_of_ours, pid_of_ours) if name == OURS else (lives_of_theirs, pid_of_theirs)
    surroundings = os.environ | ({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if name == MENDED else {})
    with open(folder / "said", "w") as said:
        launcher = subprocess.Popen(
            words, cwd=folder, stdout=said, stderr=said, env=surroundings, start_new_session=True
        )
    try:
        if not until(lambda: lives(folder) and len(lives(folder)[0].steps) >= BEFORE, launcher):
            raise RuntimeError(f"{name} did not train:\n{(folder / 'said').read_text()[-2000:]}")
        before = time.time()
        os.kill(pid(launcher.pid, folder, rank), signal.SIGKILL)
        back = until(lambda: len(lives(folder)) > 1 and lives(folder)[1].steps, launcher)
    finally:
        launcher.terminate()
        try:
            launcher.wait(60)
        except subprocess.TimeoutExpired:
            launcher.kill()
            launcher.wait()
    if not back:
        return Recovery(name, rank, float("inf"), 0)
    first, second = lives(folder)[:2]
    return Recovery(name, rank, second.steps[0][1] - before, first.steps[-1][0] - second.steps[0][0] + 1)


def until(true: Callable[[], object], launcher: subprocess.Popen[bytes]) -> bool:
    """Wait for something; gives whether it happened, while the launcher was there and within the longest time."""
    end = time.monotonic() + LONGEST
    while not true():
        if launcher.poll() is not None or time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def one(name: str, rank: int) -> Recovery:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "plan.json").write_text(json.dumps(PLAN))
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        meeting = ["--standalone"] if name == MENDED else ["--master-port", str(port)]
        words = [
            "torch.distributed.run",
            "--nproc-per-node",
            str(WORKERS),
            "--max-restarts",
            "3",
            *meeting,
            str(HERE / "plain.py"),
            place,
            str(PAUSE),
        ]
        if name == OURS:
            words = [
                "shoestring",
                "train",
                str(HERE / "job.py"),
                "--plan",
                "plan.json",
                "--run",
                "run",
                "--devices",
                str(WORKERS),
                "--save-every",
                "1",
                "--pause",
                str(PAUSE),
            ]
        return recovered(name, [sys.executable, "-m", *words], rank, folder)


def shown(seconds: list[float]) -> str:
    """Median, lowest and highest; how often there was none."""
    never = [one for one in seconds if one == float("inf")]
    if len(never) == len(seconds):
        return f"never within {LONGEST:.0f} s | "
    text = f"{median(seconds):.2f} | {min(seconds):.2f} to {max(seconds):.2f}"
    return text + (f", and {len(never)} of {len(seconds)} times never" if never else "")


def table(found: list[Recovery], load: float) -> str:
    rows = [
        "| launcher | worker killed | seconds to the next step | lowest and highest | steps done again |",
        "|---|---|---|---|---|",
    ]
    for name in LAUNCHERS:
        for rank in range(WORKERS):
            own = [one for one in found if one.launcher == name and one.rank == rank]
            rows.append(
                f"| `{name}` | {rank} | {shown([one.seconds for one in own])} | {max(one.again for one in own)} |"
            )
    ours = median(one.seconds for one in found if one.launcher == OURS)
    busy = (
        f"\n**The machine was busy with other work (load average {load:.1f}): these times say little.**\n"
        if load > 0.5
        else ""
    )
    return (
        f"\n{WORKERS} workers, {len(found) // (len(LAUNCHERS) * WORKERS)} kills of each under each launcher. {platform.machine()}, "
        f"{os.cpu_count()} cores, torch {torch.__version__}; load average before the run {load:.1f}.\n{busy}\n"
        + "\n".join(rows)
        + f"\n\nOurs, altogether: {ours:.2f} s; the target, below 8 s, is {'met' if ours < 8 else 'missed'}.\n\n"
    )


def main() -> None:
    kills, load = int(sys.argv[1]) if len(sys.argv) > 1 else 2, os.getloadavg()[0]
    found = []
    for _ in range(kills):
        for rank in range(WORKERS):
            for name in LAUNCHERS:
                found.append(one(name, rank))
                print(
                    f"{name}: worker {rank} killed, {found[-1].seconds:.2f} s, {found[-1].again} steps again",
                    file=sys.stderr,
                )
    text = README.read_text()
    head, rest = text.split(BEGIN)
    README.write_text(head + BEGIN + table(found, load) + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
