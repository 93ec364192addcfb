"""Files that appear complete or not at all, and cleaning up after processes that died.

    draft               a file is written as NAME.tmp-PID, synced and renamed, so that nobody reads half of it
    temporary folder    deleted when its user is done
    lock                held on either by its user; the kernel releases it when that process dies, however that happens

So an unlocked draft or folder was left behind, and the next process that drafts that file, or needs such a folder,
deletes it.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shoestring.core.errors import Mistake
from shoestring.core.files.regular import regular

TRIES = 300  # to lock a file that others append to, a tenth of a second each
LONGEST = 60  # bytes in the path of the temporary place: the kernel allows 107 for a socket's path inside it
DRAFT = re.compile(r"(.+)\.tmp-\d+")


def try_lock(file: int, tries: int = 5) -> bool:
    """Try to lock an open file, several times: processes that only check it hold it for a moment too."""
    for left in reversed(range(tries)):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if left:
                time.sleep(0.02)
    return False


def open_and_lock(path: Path, flags: int, opener: Callable[[Path, int, int], int] = os.open) -> tuple[int, bool]:
    """Open a file and try to lock it; returns the file and whether it is locked.

    While we waited for the lock, its holder may have moved or deleted the file. A lock on a file that has lost its name
    keeps nobody out, so the file that has the name now is opened instead.
    """
    while True:
        file = opener(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            ours = try_lock(file)
            if not ours or has_name(file, path):
                return file, ours
        except BaseException:
            os.close(file)
            raise
        os.close(file)


@contextmanager
def lock_to_append(path: Path) -> Iterator[int]:
    """While inside, nobody else appends to this file; it is created if missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    for _ in range(TRIES):
        file, ours = open_and_lock(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, regular)
        if ours:
            break
        os.close(file)
    else:
        raise Mistake(f"{path} is held by another command and has been for long: wait for it, or stop it")
    try:
        if new:
            sync(path.parent)
        yield file
    finally:
        os.close(file)


def append_synced(file: int, data: bytes) -> None:
    """Append and sync: when this returns, the data are on disk."""
    while data:
        data = data[os.write(file, data) :]
    os.fsync(file)


def has_name(file: int, path: Path) -> bool:
    """Whether an open file is the one at this path."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


# Drafts


def drafted_name(name: str) -> str:
    """The final name of a draft; empty if it is not a draft.

    >>> drafted_name("run.json.tmp-4711"), drafted_name("run.json")
    ('run.json', '')
    """
    found = DRAFT.fullmatch(name)
    return found[1] if found else ""


@contextmanager
def draft_file(path: Path, folder: bool = False) -> Iterator[Path]:
    """A path to write to; its content appears at `path` once all of it is on the disk. After an error nothing is
    left."""
    clear(one for one in path.parent.glob("*.tmp-*") if drafted_name(one.name) == path.name)
    draft = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    remove(draft)

    def make() -> Path:
        draft.mkdir(parents=True, exist_ok=True) if folder else draft.touch()
        return draft

    _, file = make_and_lock(make)
    try:
        yield draft
        for one in (*(draft.iterdir() if folder else ()), draft):
            sync(one)
        draft.rename(path)
    except BaseException:
        remove(draft)
        raise
    finally:
        os.close(file)
    sync(path.parent)


def write_whole(path: Path, data: bytes, asked: bool = False) -> None:
    """Write a file so that it appears complete or not at all. `asked`: the user gave the path, which may be no regular
    file, such as /dev/stdout, or a symbolic link to follow; in our own folders whatever has the name is replaced: no
    pipe is waited for, and no link is followed."""
    if asked and path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    with draft_file(path.resolve() if asked else path) as draft:
        draft.write_bytes(data)


def make_and_lock(make: Callable[[], Path]) -> tuple[Path, int]:
    """Create a private file or folder and lock it, if the file system has locks; retry if another process deleted it in
    between."""
    while True:
        path = make()
        try:
            return path, open_and_lock(path, os.O_RDONLY)[0]
        except FileNotFoundError:
            continue
        except OSError:
            return path, os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# Cleaning up


def clear(paths: Iterable[Path]) -> None:
    """Delete drafts and temporary files that no process holds. Those of other users, or of unknown state, stay."""
    for path in paths:
        with suppress(OSError):
            found = os.lstat(path)
            if found.st_uid != os.getuid() or not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
                continue
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if try_lock(file, tries=1) and has_name(file, path):
                    remove(path)
            finally:
                os.close(file)


def remove(path: Path) -> None:
    """Delete a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def temporary_place() -> str:
    """Where temporary folders are made: the system's place, or /tmp if that has too long a name for a socket inside."""
    place = tempfile.gettempdir()
    return "/tmp" if len(os.fsencode(place)) > LONGEST and os.access("/tmp", os.W_OK) else place


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A private folder, deleted at the end; first those left by killed processes are deleted."""
    place = temporary_place()
    clear(Path(place).glob("shoestring-folder-*"))
    path, file = make_and_lock(lambda: Path(tempfile.mkdtemp(prefix="shoestring-folder-", dir=place)))
    try:
        yield path
    finally:
        remove(path)
        os.close(file)
