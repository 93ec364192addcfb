"""The folder of a run: everything about it in one place, and one process at a time.

    run.json        the request: the job's source, its flags, budget, techniques, and the environment
    job.py          a copy of the job file
    plan.json       the plan, with the planner's outcome
    events.jsonl    the events so far, one per line
    checkpoints/    states that it can be resumed from
    report.json, report.html    predicted beside measured
    lock            held while a process trains here

The JSON files are sealed (core/files/seal): a file that was changed is refused, with advice.

Contract: What the folder holds is checked when it is read (decisions/013): a damaged request or plan is never trained
from, a damaged event is skipped and counted, and the report tells of both instead of failing
(tests/runs/test_damage.py). Only regular files are opened, and none under a lock that others need
(tests/runs/test_unreadable.py).

A lock counts only while the locked file still has its name: starting a run afresh moves the folder away together with
its lock (tests/runs/test_folder.py). A run is finished when its last weights are saved (tests/runs/checkpoints/test_saver.py).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

from shoestring.core.errors import Mistake
from shoestring.core.files.codec import Unreadable, from_json, to_json
from shoestring.core.files.files import open_and_lock, write_whole
from shoestring.core.files.regular import read_regular, regular
from shoestring.core.files.seal import Damaged, seal, unseal
from shoestring.runs.request import Request

# Advice about a file that can't be read
CURES = {
    "plan.json": "--adopt plans anew and goes on from the last checkpoint, --fresh begins anew",
    "plan-next.json": "leave --replan out to go on with the plan it had",
    "report.json": "the same command makes it again",
}


class Unusable(Mistake):
    """A file of a run exists and can't be trusted."""


@dataclass(frozen=True)
class Folder:
    path: Path
    place: str = "--run"  # the flag that named the folder, for messages

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def read(self, name: str) -> dict[str, Any]:
        """The content of a JSON file of the run; empty if it does not exist. Damaged files are refused."""
        try:
            found, _ = unseal(read_regular(self.path / name))
        except FileNotFoundError:
            return {}
        except (OSError, Damaged) as error:
            raise self.unusable(name, error) from error
        return found

    def unusable(self, name: str, error: Exception) -> Unusable:
        cure = CURES.get(name, f"give another {self.place}, or --fresh to begin anew (what is here is kept aside)")
        return Unusable(f"{self.path / name} is damaged ({error}): {cure}")

    def request(self) -> Request | None:
        """The run's request; None if no run was started yet. A damaged one is refused."""
        found = self.read("run.json")
        try:
            return from_json(Request, found) if found else None
        except Unreadable as error:
            raise self.unusable("run.json", error) from error

    def write(self, name: str, data: Mapping[str, Any]) -> None:
        write_whole(self.path / name, seal(data))

    def begin(self, request: Request, source: bytes) -> None:
        self.write("run.json", to_json(request))
        self.keep_source(source)

    def keep_source(self, source: bytes) -> None:
        write_whole(self.path / "job.py", source)

    def set_aside(self) -> Path:
        """Rename the folder to make room for a fresh start; nothing is deleted. Its lock moves with it, so take a new
        one."""
        first = self.path.with_name(f"{self.path.name}-before-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
        numbered = (first.with_name(f"{first.name}-{number}") for number in count(2))
        return self.path.rename(next(aside for aside in chain([first], numbered) if not aside.exists()))


class Lock:
    """Allows one process at a time in a folder. The kernel releases it when the holder dies, however that happens."""

    def __init__(self, folder: Path, place: str = "--run") -> None:
        self.file, ours = lock_of(folder)
        if not ours:
            holder = os.pread(self.file, 64, 0).decode(errors="replace").strip() or "unknown"
            os.close(self.file)
            raise Mistake(
                f"{folder} is in use by process {holder}: wait for it, stop it (kill {holder}), or give another {place}"
            )
        self.name()

    def name(self, pid: int | None = None) -> None:
        """Record the holder's process id: this process, or the worker that took over."""
        os.ftruncate(self.file, 0)
        os.pwrite(self.file, str(pid or os.getpid()).encode(), 0)

    def release(self) -> None:
        os.close(self.file)


def lock_of(folder: Path) -> tuple[int, bool]:
    """The lock file that has this name now, and whether we hold it. Another process may move the folder away to start
    afresh."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            return open_and_lock(folder / "lock", os.O_RDWR | os.O_CREAT, regular)


def holder(folder: Path) -> int | None:
    """The id of the process that is training in a folder now, if there is one."""
    try:
        file = regular(folder / "lock", os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.pread(file, 64, 0).decode(errors="replace").strip()
        return int(text) if text.isdecimal() else -1
    except OSError:  # this file system has no locks
        return None
    finally:
        os.close(file)
    return None


def has_digest(path: Path, digest: str) -> bool:
    """Whether a file exists and has this SHA-256, allowing for the line ends that an earlier version's copies have."""
    try:
        data = read_regular(path)
    except (OSError, ValueError):  # ValueError: an impossible path
        return False
    return digest in (hashlib.sha256(one).hexdigest() for one in (data, data.replace(b"\n", b"\r\n")))
