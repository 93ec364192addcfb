"""Open regular files only, and never wait for one.

A pipe in place of a file makes `open` wait for a writer, and opening a device may do anything. A run's folder contains
neither, so both are refused before they are opened.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat

from shoestring.core.errors import Mistake

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFDIR: "a folder",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a link",
}
LARGEST = 1 << 30  # bytes of a file that is read as a whole


class NotRegular(OSError, Mistake):
    """Something other than a regular file is at the path."""

    def __init__(self, path: str | Path, mode: int) -> None:
        super().__init__(f"{path} is {KINDS.get(stat.S_IFMT(mode), 'something else')}, not a file: remove it")
        self.strerror = str(self)


def regular(path: str | Path, flags: int, mode: int = 0o644) -> int:
    """The descriptor of a regular file, as `os.open` gives it; also an `opener` for `open`."""
    try:
        check(path, os.stat(path).st_mode)
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    try:
        file = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, mode)
    except OSError as error:
        if error.errno == errno.ELOOP and flags & os.O_NOFOLLOW:
            raise NotRegular(path, stat.S_IFLNK) from error
        raise
    try:
        check(path, os.fstat(file).st_mode)  # it may have been replaced since
    except NotRegular:
        os.close(file)
        raise
    return file


def check(path: str | Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise NotRegular(path, mode)


def not_a_folder(path: Path) -> str:
    """What is in the place of a folder, as a clause; empty if a folder is there, or nothing yet.

    >>> import pathlib
    >>> not_a_folder(pathlib.Path("/dev/null"))
    '/dev/null is a device, and a folder has to be there'
    """
    if path.is_dir() or not os.path.lexists(path):
        return ""
    mode = os.lstat(path).st_mode
    what = "a link that leads to no folder" if stat.S_ISLNK(mode) else KINDS.get(stat.S_IFMT(mode), "a file")
    return f"{path} is {what}, and a folder has to be there"


def read_regular(path: str | Path) -> bytes:
    """A file's whole content. Files larger than LARGEST are refused: none of ours is, and a sparse file can claim any
    size."""
    with open(path, "rb", opener=regular) as file:
        if (size := os.fstat(file.fileno()).st_size) > LARGEST:
            raise OSError(errno.EFBIG, f"its {size:,} bytes are more than any file of ours has", str(path))
        return file.read()


def file_sha256(path: str | Path) -> str:
    """The SHA-256 of a file's content."""
    return hashlib.sha256(read_regular(path)).hexdigest()
