"""Beginning a run in a folder, or going on with the one that is there."""

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
from shoestring.core.files import clear, drafted_name, write_whole
from shoestring.core.regular import not_a_folder, read_regular
from shoestring.runs.event import Adopted, Finished, Warned
from shoestring.runs.events import note
from shoestring.runs.folder import Folder, Lock, has_digest
from shoestring.runs.history import History
from shoestring.runs.modules import NAME as MODULES
from shoestring.runs.modules import changed_text, changes, keep_modules, kept_modules, modules_on_path, refusal
from shoestring.runs.request import Request, argument_differences, differences, flags_together

# Files that a start leaves before its first step
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
SPENT = "privacy.jsonl"  # what was spent on the people of a run is never forgotten


def new_folder(job: str) -> Path:
    """runs/JOB-TIME, a name that nothing has yet."""
    first = Path("runs") / f"{job}-{time.strftime('%Y%m%d-%H%M%S')}"
    for path in chain([first], (first.with_name(f"{first.name}-{number}") for number in count(2))):
        with suppress(FileExistsError):  # by another command of the same second
            path.mkdir(parents=True)
            return path
    raise AssertionError("there is always another number")


def strangers(path: Path) -> list[str]:
    """What is in a folder that is no run's and could not be the beginning of one; drafts of a process that was killed are."""
    try:
        names = sorted(one.name for one in path.iterdir())
    except (FileNotFoundError, NotADirectoryError):  # nothing yet, or moved away just now
        return []
    return (
        []
        if "run.json" in names
        else [name for name in names if name not in ("lock", SPENT) and drafted_name(name) != "run.json"]
    )


@dataclass(frozen=True)
class OpenedRun:
    """A folder that this process holds, and what is to be trained in it."""

    folder: Folder
    lock: Lock
    request: Request  # what is asked for now, with what was asked for before where nothing is said now
    changed: bool  # what was asked for is not what the folder was begun with: plan anew


@dataclass(frozen=True)
class Resolved:
    """What is known of a job when it is made."""

    arguments: Mapping[str, Any] = field(default_factory=dict)  # of its function, all of them
    modules: Mapping[str, str] = field(default_factory=dict)  # local modules that it has imported -> SHA-256


Resolve = Callable[[Mapping[str, Any]], Resolved]  # makes the job with these flags


def without_a_step(folder: Path) -> bool:
    """Whether no step of a run was ever finished, so that there is nothing in its folder to go on from or to look at."""
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
    except OSError:  # something else is there, which whoever saves tells of
        return False


def came_to_nothing(error: BaseException, folder: Path) -> bool:
    """Whether an error is the user's to mend and came before the first step: there is no run then to look at. A plan that was made after
    memory ran out is kept."""
    return (
        isinstance(error, (Mistake, OverBudget)) and without_a_step(folder) and not (folder / "plan-next.json").exists()
    )


def forget_attempt(folder: Path, begins: bool = False) -> None:
    """Remove what a start has left that came to nothing; the folder too, if nothing else is in it and nothing `begins` there. For who
    holds its lock."""
    for name in ATTEMPT:
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "tensorboard", ignore_errors=True)
    if not begins and {one.name for one in folder.iterdir()} <= {"lock", "checkpoints"}:
        with suppress(OSError):  # of somebody who waits for the lock
            (folder / "checkpoints").rmdir()
        with suppress(OSError):
            (folder / "lock").unlink(missing_ok=True)
            folder.rmdir()


def settled(now: Request, before: Request) -> Request:
    """What the plan follows from, beside the job: as it was, unless it is asked for now. --exact and --inexact are one choice."""
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
    """Begin a new run's ledger with what was spent in this folder before it was set aside: beginning anew undoes no release. A ledger
    only grows and is carried whole, so the largest has all of it."""
    before = list(path.parent.glob(f"{escape(path.name)}-before-*/{SPENT}"))
    if before and not (path / SPENT).exists():
        write_whole(path / SPENT, read_regular(max(before, key=lambda one: one.lstat().st_size)))


def opened(
    path: Path,
    asked: Request,
    source: bytes,
    fresh: bool,
    adopt: bool,
    usual: Mapping[str, Any] | None = None,
    resolve: Resolve | None = None,
    place: str = "--run",
) -> OpenedRun:
    """Lock a folder and settle what it is for: a new run, or the one that is there if it is the same. A run without a finished step is
    nobody's: whoever asks for something else takes its folder. `source`: of the job; `usual`: values of the job's flags that are not
    given; `resolve` makes the job with these flags, and what it raises leaves nothing behind. None: a script made it, whose process has
    other modules than the job's too; it is told of those that changed when it trains. `place`: the flag that names the folder."""
    strange = strangers(path)
    if strange or path.is_file():
        raise Mistake(
            f"{path} is there and is not a run of shoestring ({', '.join(strange[:3]) or 'a file'}): give another {place}"
        )
    lock = Lock(path, place)
    folder, ours = Folder(path, place), True
    try:
        while fresh and (path / "run.json").exists():  # again if somebody began another one meanwhile
            folder.set_aside()
            ours = False
            moved, lock = lock, Lock(path, place)  # refused where somebody else was quicker: then that folder is theirs
            ours = True
            moved.release()
        if not (
            path / "run.json"
        ).exists():  # whoever set the folder aside may have been killed, or slower than this process
            carry_ledger(path)
        clear(one for one in path.glob("*.tmp-*") if drafted_name(one.name))
        if in_the_way := not_a_folder(folder.checkpoints):
            raise Mistake(f"{in_the_way}, for the run's checkpoints: move it away, or give another {place}")
        before = folder.request()
        held = gone_on(folder, lock, before, asked, source, adopt, usual, resolve) if before is not None else None
        return held or begun(folder, lock, asked, source, resolve)
    except BaseException:
        if ours and not (path / "run.json").exists():
            forget_attempt(path)
        lock.release()
        raise


def begun(folder: Folder, lock: Lock, asked: Request, source: bytes, resolve: Resolve | None) -> OpenedRun:
    """A new run in a folder."""
    request = asked
    if resolve is not None:
        made = resolve(asked.flags)
        request = replace(asked, arguments=made.arguments)
        keep_modules(folder, made.modules)
    folder.begin(request, source)
    return OpenedRun(folder, lock, request, True)


def gone_on(
    folder: Folder,
    lock: Lock,
    before: Request,
    asked: Request,
    source: bytes,
    adopt: bool,
    usual: Mapping[str, Any] | None,
    resolve: Resolve | None,
) -> OpenedRun | None:
    """The run that is in a folder, if it is the same or is adopted; None: it came to nothing, and another is asked for."""
    path, beside, request = folder.path, Path(asked.job).parent, settled(asked, before)
    modules = (kept_modules(folder) if resolve is not None else None) or {}
    changed = set(changes(modules, {}, beside).changed)
    found = differences(before, asked, usual)
    made = Resolved(asked.arguments or before.arguments)
    settled_already = (
        (path / "report.json").exists() if not (found or changed) else not adopt
    )  # it is finished, or refused
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
            with suppress(OSError):  # the copy is for later, and whoever needs it then is told that it is not whole
                folder.keep_source(source)
        return OpenedRun(folder, lock, replace(request, flags=before.flags), False)
    for name in ("report.json", "plan.json"):  # of what was asked for before
        (path / name).unlink(missing_ok=True)
    folder.begin(request, source)
    keep_modules(folder, {**modules_on_path(modules, beside), **made.modules})
    note(path, Adopted(tuple(found)))
    return OpenedRun(folder, lock, request, True)
