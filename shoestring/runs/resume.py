"""Beginning a run in a folder, or going on with the one that is there."""
from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoestring.core.errors import Mistake
from shoestring.runs.events import note
from shoestring.runs.folder import Folder, Lock, differences

CHOICES = ("memory", "use", "inexact", "plan")   # what the plan follows from, beside the job


def new_folder(job: str) -> Path:
    """runs/JOB-TIME, a name that nothing has yet."""
    first = Path("runs") / f"{job}-{time.strftime('%Y%m%d-%H%M%S')}"
    numbered = (first.with_name(f"{first.name}-{number}") for number in range(2, 1000))
    return next(path for path in (first, *numbered) if not path.exists())


@dataclass(frozen=True)
class Opened:
    """A folder that this process holds, and what is to be trained in it."""

    folder: Folder
    lock: Lock
    asked: Mapping[str, Any]
    changed: bool       # what was asked for is not what the folder was begun with: plan anew


def opened(path: Path, asked: dict[str, Any], source: Path, fresh: bool, adopt: bool) -> Opened:
    """Lock a folder and settle what it is for: a new run, or the one that is there if it is the same."""
    strange = [one.name for one in path.iterdir() if one.name != "lock"] if path.is_dir() and not (path / "run.json").exists() else []
    if strange or path.is_file():
        raise Mistake(f"{path} is there and is not a run of shoestring ({', '.join(strange[:3]) or 'a file'}): give another --run")
    lock = Lock(path)
    folder = Folder(path)
    try:
        if fresh and (path / "run.json").exists():
            folder.set_aside()
            lock.release()
            lock = Lock(path)
        before = folder.read("run.json")
        if not before:
            folder.begin(asked, source.read_text())
            return Opened(folder, lock, asked, True)
        found = differences(before, asked)
        if found and not adopt:
            raise Mistake(f"{path} holds a run that differs from what is asked for now: {'; '.join(found)}. "
                          f"--adopt goes on from its last checkpoint with what is asked for now, --fresh begins anew "
                          f"(and keeps the old run aside)")
        settled = asked | {name: before[name] for name in CHOICES if asked[name] in (None, False)}
        if before["environment"] != asked["environment"]:
            was = ", ".join(f"{name} {before['environment'].get(name)} -> {value}" for name, value in asked["environment"].items()
                            if before["environment"].get(name) != value)
            note(path, "warning", text=f"the run goes on in another environment than it was begun in ({was}): "
                                             f"its last bits may not be those of a run that never stopped")
        if not found:
            return Opened(folder, lock, settled | {"flags": before["flags"]}, False)
        for name in ("report.json", "plan.json"):   # of what was asked for before
            (path / name).unlink(missing_ok=True)
        folder.begin(settled, source.read_text())
        note(path, "adopted", differences=found)
        return Opened(folder, lock, settled, True)
    except BaseException:
        lock.release()
        raise
