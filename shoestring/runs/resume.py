"""Start a run in a folder, or resume the one that is there."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from glob import escape
from itertools import chain, count
from pathlib import Path
from typing import Any

from shoestring.core.errors import Mistake, OverBudget
from shoestring.core.files.files import clear, drafted_name, write_whole
from shoestring.core.files.regular import not_a_folder, read_regular
from shoestring.runs.events.event import Adopted, Finished, Warned
from shoestring.runs.events.event_log import note
from shoestring.runs.events.history import History
from shoestring.runs.folder import Folder, Lock, has_digest, holder
from shoestring.runs.modules import NAME as MODULES
from shoestring.runs.modules import changed_text, changes, keep_modules, kept_modules, modules_on_path, refusal
from shoestring.runs.request import Request, argument_differences, differences, flags_together

# Files that a start writes before its first step
ATTEMPT = (
    "events.jsonl",
    "privacy.json",
    "plan.json",
    "plan-next.json",
    "report.json",
    "report.html",
    "job.py",
    MODULES,
    "moments.bin",
    "stream.bin",
    "run.json",
)
SPENT = "privacy.jsonl"  # the privacy ledger of a run's records, which is never discarded


def new_folder(job: str) -> Path:
    """An unused folder name, runs/JOB-TIME."""
    first = Path("runs") / f"{job}-{time.strftime('%Y%m%d-%H%M%S')}"
    for path in chain([first], (first.with_name(f"{first.name}-{number}") for number in count(2))):
        with suppress(FileExistsError):  # another command of the same second took it
            path.mkdir(parents=True)
            return path
    raise AssertionError("there is always another number")


def foreign_files(path: Path) -> list[str]:
    """Files in a folder that belong to no run of ours; what a killed process left of its start is not counted."""
    try:
        names = sorted(one.name for one in path.iterdir())
    except (FileNotFoundError, NotADirectoryError):  # missing, or just moved away
        return []
    ours = {"lock", SPENT, *([MODULES] if "lock" in names else [])}
    return (
        []
        if "run.json" in names
        else [name for name in names if name not in ours and drafted_name(name) not in ("run.json", MODULES)]
    )


@dataclass(frozen=True)
class OpenedRun:
    """A run folder that this process holds, and the request to execute in it."""

    folder: Folder
    lock: Lock
    request: Request  # the present request, completed by the earlier one
    changed: bool  # the request differs from the folder's: plan again


@dataclass(frozen=True)
class Resolved:
    """What is known about a job once it was made."""

    arguments: Mapping[str, Any] = field(default_factory=dict)  # all arguments of its function
    modules: Mapping[str, str] = field(default_factory=dict)  # local modules that it imported -> SHA-256


Resolve = Callable[[Mapping[str, Any]], Resolved]  # makes the job with these flags


def without_a_step(folder: Path) -> bool:
    """Whether a run has not finished a single step, so that its folder has nothing to resume or look at."""
    history = History().read(folder)
    if (
        history.steps
        or any(isinstance(event, Finished) for event in history.others)
        or any(history.told.values())
        or history.saved
        or history.damaged
        or history.wrong
        or (folder / SPENT).exists()
    ):
        return False
    try:
        return not any((folder / "checkpoints").iterdir())
    except FileNotFoundError:
        return True
    except OSError:  # it is no folder, which the saver reports
        return False


def came_to_nothing(error: BaseException, folder: Path) -> bool:
    """Whether an error is the user's mistake and came before the first step, so no run is left to look at. A plan made
    after running out of memory is kept."""
    return (
        isinstance(error, (Mistake, OverBudget)) and without_a_step(folder) and not (folder / "plan-next.json").exists()
    )


def forget_attempt(folder: Path, begins: bool = False) -> None:
    """Remove the files of a start that failed; also the folder, if it is empty and nothing `begins` there. Only for the
    holder of its lock."""
    for name in ATTEMPT:
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "tensorboard", ignore_errors=True)
    if not begins and {one.name for one in folder.iterdir()} <= {"lock", "checkpoints"}:
        with suppress(OSError):  # another process waits for the lock
            (folder / "checkpoints").rmdir()
        with suppress(OSError):
            (folder / "lock").unlink(missing_ok=True)
            folder.rmdir()


def planning_options(now: Request, before: Request) -> Request:
    """The options that determine the plan besides the job: the earlier ones, unless given now. --exact and --inexact
    count as one option."""
    return replace(
        now,
        flags=flags_together(before.flags, now.flags),
        memory=before.memory if now.memory is None else now.memory,
        use=before.use if now.use is None else now.use,
        plan=before.plan if now.plan is None else now.plan,
        inexact=now.inexact or (before.inexact and not now.exact),
        exact=before.exact if now.exact is None and not now.inexact else now.exact,
        asked={name: before.asked.get(name) if value is None else value for name, value in now.asked.items()},
    )


def carry_ledger(path: Path) -> None:
    """Copy the privacy ledger of a folder that was set aside into the new run, because starting afresh undoes no
    release. Ledgers only grow and are copied whole, so the largest is complete."""
    before = list(path.parent.glob(f"{escape(path.name)}-before-*/{SPENT}"))
    if before and not (path / SPENT).exists():
        write_whole(path / SPENT, read_regular(max(before, key=lambda one: one.lstat().st_size)))


def open_run(
    path: Path,
    asked: Request,
    source: bytes,
    fresh: bool,
    adopt: bool,
    usual: Mapping[str, Any] | None = None,
    resolve: Resolve | None = None,
    place: str = "--run",
) -> OpenedRun:
    """Lock a folder and settle what is executed in it: a new run, or the one that is there if it is the same. A run
    without a finished step may be replaced by any other request. `source`: of the job; `usual`: defaults of the job's
    flags; `resolve` makes the job with these flags, and its errors leave nothing behind. `resolve` is None for a job
    made by a script, whose process imports other modules besides; changed ones are reported when it trains. `place`:
    the flag that names the folder."""
    strange = foreign_files(path)
    if strange and (other := holder(path)) is not None:
        raise Mistake(
            f"process {other} is beginning a run in {path}: wait for it, stop it (kill {other}), or give another {place}"
        )
    if strange or path.is_file():
        raise Mistake(
            f"{path} is there and is not a run of shoestring ({', '.join(strange[:3]) or 'a file'}): give another {place}"
        )
    lock = Lock(path, place)
    folder, ours = Folder(path, place), True
    try:
        while fresh and (path / "run.json").exists():  # repeat: another process may have started a run meanwhile
            folder.set_aside()
            ours = False
            moved, lock = lock, Lock(path, place)  # refused if another process was quicker: then the folder is its own
            ours = True
            moved.release()
        if not (
            path / "run.json"
        ).exists():  # the process that set the folder aside may have been killed, or may be slower than this one
            carry_ledger(path)
        clear(one for one in path.glob("*.tmp-*") if drafted_name(one.name))
        if in_the_way := not_a_folder(folder.checkpoints):
            raise Mistake(f"{in_the_way}, for the run's checkpoints: move it away, or give another {place}")
        before = folder.request()
        held = continue_run(folder, lock, before, asked, source, adopt, usual, resolve) if before is not None else None
        return held or start_run(folder, lock, asked, source, resolve)
    except BaseException:
        if ours and not (path / "run.json").exists():
            forget_attempt(path)
        lock.release()
        raise


def start_run(folder: Folder, lock: Lock, asked: Request, source: bytes, resolve: Resolve | None) -> OpenedRun:
    """Start a new run in a folder."""
    request = asked
    if resolve is not None:
        made = resolve(asked.flags)
        request = replace(asked, arguments=made.arguments)
        keep_modules(folder, made.modules)
    folder.begin(request, source)
    return OpenedRun(folder, lock, request, True)


def continue_run(
    folder: Folder,
    lock: Lock,
    before: Request,
    asked: Request,
    source: bytes,
    adopt: bool,
    usual: Mapping[str, Any] | None,
    resolve: Resolve | None,
) -> OpenedRun | None:
    """The run in a folder if it is the same or is adopted; None: it had not begun, and another one is requested."""
    path, beside, request = folder.path, Path(asked.job).parent, planning_options(asked, before)
    modules = (kept_modules(folder) if resolve is not None else None) or {}
    changed = set(changes(modules, {}, beside).changed)
    found = differences(before, asked, usual)
    made = Resolved(asked.arguments or before.arguments)
    settled_already = (path / "report.json").exists() if not (found or changed) else not adopt  # finished, or refused
    if resolve is not None and not settled_already:
        made = resolve(request.flags if found else before.flags)
        changed |= {*changes(modules, made.modules, beside).changed}
    found += [*map(changed_text, sorted(changed)), *argument_differences(before, asked, made.arguments)]
    if found and without_a_step(path):
        forget_attempt(path, begins=True)
        return None
    if found and not adopt:
        raise refusal(folder, found)
    if before.environment != asked.environment:
        was = ", ".join(
            f"{name} {before.environment.get(name)} -> {value}"
            for name, value in asked.environment.items()
            if before.environment.get(name) != value
        )
        note(
            path,
            Warned(
                f"the run goes on in another environment than it was begun in ({was}): "
                f"its last bits may not be those of a run that never stopped"
            ),
        )
    request = replace(request, arguments=made.arguments)
    if not found:
        if not has_digest(path / "job.py", asked.source):  # killed before that was written
            with suppress(OSError):  # the copy is for later use, where an incomplete one is reported
                folder.keep_source(source)
        return OpenedRun(folder, lock, replace(request, flags=before.flags), False)
    for name in ("report.json", "plan.json"):  # of the earlier request
        (path / name).unlink(missing_ok=True)
    folder.begin(request, source)
    keep_modules(folder, {**modules_on_path(modules, beside), **made.modules})
    note(path, Adopted(tuple(found)))
    return OpenedRun(folder, lock, request, True)
