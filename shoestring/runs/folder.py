"""The folder of a run: everything about it in one place, and one process at a time.

    run.json        what was asked: the job's source, its flags, budget, techniques, and the environment
    job.py          the job file as it was
    plan.json       the plan, with the planner's outcome
    events.jsonl    what happened
    checkpoints/    where it can go on from
    report.json, report.html    predicted beside measured
    lock            held while a process trains here
"""
from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoestring.core.errors import Mistake


@dataclass(frozen=True)
class Folder:
    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def read(self, name: str) -> dict[str, Any]:
        """A JSON file of the run; empty where there is none."""
        try:
            found = json.loads((self.path / name).read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise Mistake(f"{self.path / name} can't be read ({error}): give another --run, or --fresh to begin anew") from error
        if not isinstance(found, dict):
            raise Mistake(f"{self.path / name} is not what shoestring writes: give another --run, or --fresh to begin anew")
        return found

    def write(self, name: str, data: Mapping[str, Any]) -> None:
        write_whole(self.path / name, json.dumps(data, indent=1).encode())

    def begin(self, asked: Mapping[str, Any], source: str) -> None:
        self.write("run.json", asked)
        write_whole(self.path / "job.py", source.encode())

    def set_aside(self) -> Path:
        """Move what is here out of the way, for a fresh beginning; nothing is deleted."""
        aside = self.path.with_name(f"{self.path.name}-before-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
        self.path.rename(aside)
        self.path.mkdir(parents=True)
        return aside


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that it is there whole or not at all."""
    draft = path.with_name(path.name + f".tmp-{os.getpid()}")
    with open(draft, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make renames in a folder last."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Lock:
    """One process at a time in a folder. The kernel frees it when its holder dies, however that happens."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if not locked(self.file):
            holder = os.pread(self.file, 64, 0).decode(errors="replace").strip() or "unknown"
            os.close(self.file)
            raise Mistake(f"{folder} is in use by process {holder}: wait for it, stop it (kill {holder}), "
                          f"or give another --run")
        self.name()

    def name(self, pid: int | None = None) -> None:
        """Say who holds it: this process, or the worker that was given it."""
        os.ftruncate(self.file, 0)
        os.pwrite(self.file, str(pid or os.getpid()).encode(), 0)

    def release(self) -> None:
        os.close(self.file)


def locked(file: int) -> bool:
    """Try to lock a file, a few times: who looks at it holds it for a moment too."""
    for _ in range(5):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.02)
    return False


def holder(folder: Path) -> int | None:
    """The process that trains in a folder now, if one does."""
    try:
        file = os.open(folder / "lock", os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.pread(file, 64, 0).decode(errors="replace").strip()
        return int(text) if text.isdigit() else -1
    finally:
        os.close(file)
    return None


def asked_for(job: Path, flags: Mapping[str, Any], memory: int | None, use: list[str] | None, inexact: bool,
              plan: str | None) -> dict[str, Any]:
    """What a user asked for, as it is compared when a run is resumed."""
    return {
        "job": str(job), "source": hashlib.sha256(job.read_bytes()).hexdigest(), "flags": dict(flags), "memory": memory,
        "use": use, "inexact": inexact, "plan": plan and hashlib.sha256(Path(plan).read_bytes()).hexdigest(),
        "environment": environment_now(),
    }


def source_of(folder: Folder) -> Path:
    """The job file of a run: where it was if it is the same, so that what it imports is found; else the copy."""
    asked = folder.read("run.json")
    there = Path(asked["job"])
    same = there.exists() and hashlib.sha256(there.read_bytes()).hexdigest() == asked["source"]
    return there if same else folder.path / "job.py"


def environment_now() -> dict[str, Any]:
    import torch

    from shoestring import __version__

    return {"shoestring": __version__, "python": platform.python_version(), "torch": torch.__version__,
            "machine": platform.machine(), "threads": torch.get_num_threads()}


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What is asked for now that was not then; what is not asked for now stays as it was."""
    found = []
    if before["source"] != now["source"]:
        found.append(f"the job file {Path(now['job']).name} is not the one it was begun with (kept as job.py in the run)")
    for name in sorted({*before["flags"], *now["flags"]}):
        if before["flags"].get(name) != now["flags"].get(name) and now["flags"]:
            found.append(f"--{name} was {before['flags'].get(name, 'not given')} and is {now['flags'].get(name, 'not given')}")
    for name, given in (("memory", now["memory"] is not None), ("use", now["use"] is not None), ("inexact", now["inexact"]),
                        ("plan", now["plan"] is not None)):
        if given and before[name] != now[name]:
            was, now_is = (value if value is not None else "not given" for value in (before[name], now[name]))
            found.append(f"--{name} was {was} and is {now_is}")
    return found
