"""Beginning a run in a folder, or going on with the one that is there."""
from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

from shoestring.core.errors import Mistake
from shoestring.core.files import clear, drafted_name
from shoestring.runs.event import Adopted, Warned
from shoestring.runs.events import note
from shoestring.runs.folder import Folder, Lock, has_digest
from shoestring.runs.request import Request, differences, flags_together


def new_folder(job: str) -> Path:
    """runs/JOB-TIME, a name that nothing has yet."""
    first = Path("runs") / f"{job}-{time.strftime('%Y%m%d-%H%M%S')}"
    for path in chain([first], (first.with_name(f"{first.name}-{number}") for number in count(2))):
        with suppress(FileExistsError):   # by another command of the same second
            path.mkdir(parents=True)
            return path
    raise AssertionError("there is always another number")


def strangers(path: Path) -> list[str]:
    """What is in a folder that is no run's and could not be the beginning of one; drafts of a process that was killed are."""
    try:
        names = sorted(one.name for one in path.iterdir())
    except (FileNotFoundError, NotADirectoryError):   # nothing yet, or moved away just now
        return []
    return [] if "run.json" in names else [name for name in names if name != "lock" and drafted_name(name) != "run.json"]


@dataclass(frozen=True)
class Opened:
    """A folder that this process holds, and what is to be trained in it."""

    folder: Folder
    lock: Lock
    request: Request    # what is asked for now, with what was asked for before where nothing is said now
    changed: bool       # what was asked for is not what the folder was begun with: plan anew


def settled(now: Request, before: Request) -> Request:
    """What the plan follows from, beside the job: as it was, unless it is asked for now. --exact and --inexact are one choice."""
    return replace(
        now, flags=flags_together(before.flags, now.flags), memory=before.memory if now.memory is None else now.memory,
        use=before.use if now.use is None else now.use, plan=before.plan if now.plan is None else now.plan,
        inexact=now.inexact or (before.inexact and not now.exact),
        exact=before.exact if now.exact is None and not now.inexact else now.exact,
        federated=now.federated and {name: (before.federated or {}).get(name) if value is None else value
                                     for name, value in now.federated.items()})


def opened(path: Path, asked: Request, source: bytes, fresh: bool, adopt: bool, usual: Mapping[str, Any] | None = None) -> Opened:
    """Lock a folder and settle what it is for: a new run, or the one that is there if it is the same. `source`: of the job; `usual`: values
    of the job's flags that are not given."""
    strange = strangers(path)
    if strange or path.is_file():
        raise Mistake(f"{path} is there and is not a run of shoestring ({', '.join(strange[:3]) or 'a file'}): give another --run")
    lock = Lock(path)
    folder = Folder(path)
    try:
        while fresh and (path / "run.json").exists():   # again if somebody began another one meanwhile
            folder.set_aside()
            moved, lock = lock, Lock(path)
            moved.release()
        clear(one for one in path.glob("*.tmp-*") if drafted_name(one.name))
        before = folder.request()
        if before is None:
            folder.begin(asked, source)
            return Opened(folder, lock, asked, True)
        found = differences(before, asked, usual)
        if found and not adopt:
            raise Mistake(f"{path} holds a run that differs from what is asked for now: {'; '.join(found)}. "
                          f"--adopt goes on from its last checkpoint with what is asked for now, --fresh begins anew "
                          f"(and keeps the old run aside)")
        request = settled(asked, before)
        if before.environment != asked.environment:
            was = ", ".join(f"{name} {before.environment.get(name)} -> {value}" for name, value in asked.environment.items()
                            if before.environment.get(name) != value)
            note(path, Warned(f"the run goes on in another environment than it was begun in ({was}): "
                              f"its last bits may not be those of a run that never stopped"))
        if not found:
            if not has_digest(path / "job.py", asked.source):   # killed before that was written
                with suppress(OSError):   # the copy is for later, and whoever needs it then is told that it is not whole
                    folder.keep_source(source)
            return Opened(folder, lock, replace(request, flags=before.flags), False)
        for name in ("report.json", "plan.json"):   # of what was asked for before
            (path / name).unlink(missing_ok=True)
        folder.begin(request, source)
        note(path, Adopted(tuple(found)))
        return Opened(folder, lock, request, True)
    except BaseException:
        lock.release()
        raise
