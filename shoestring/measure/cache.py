"""What was found out about this machine and is kept between runs: small JSON files in the user's cache folder.

They are a shortcut and nothing else: one that is damaged, unreadable, of another shape or no regular file (a pipe, a device) counts as not
there, and what it would have said is found out again. Each is sealed, and is there whole or not at all. A seal shows damage; anybody could
write another file with one. So what is read is checked too, and a file that another user (other than root) owns or may write to, or a
folder of ours in which it lies, counts as not there: a believable wrong number could not be told from a right one.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from shoestring.core.codec import from_json, to_json
from shoestring.core.files import drafted
from shoestring.core.regular import regular
from shoestring.core.seal import sealed, unsealed

T = TypeVar("T")
MOST = 1 << 63  # no figure of ours is as large


def cache_folder() -> Path:
    """Where caches are: under $XDG_CACHE_HOME, or ~/.cache where that is not set or not absolute, as its specification wants it."""
    for place in (os.environ.get("XDG_CACHE_HOME", ""), os.path.join(os.path.expanduser("~"), ".cache")):
        if os.path.isabs(place):
            return Path(place) / "shoestring"
    return Path(os.devnull) / "shoestring"  # a user without a home: nothing can be kept


def read_kept(path: Path, kind: type[T]) -> T | None:
    """What was kept in a file; None where nothing was, or not what was written."""
    try:
        if not all(only_ours(os.stat(folder)) for folder in folders_above(path)):
            return None
        with open(path, "rb", opener=regular) as file:
            if not only_ours(os.fstat(file.fileno())):
                return None
            found, whole = unsealed(file.read())
    except (OSError, ValueError):  # Damaged is one; a path that can't be is another
        return None
    return value_of(kind, found) if whole else None


def value_of(kind: type[T], data: Any) -> T | None:
    """A value from JSON that was kept; None if it is none."""
    if not bounded(data):
        return None
    try:
        return from_json(kind, data)
    except Exception:  # a class may check its values and raise what it likes
        return None


def bounded(data: Any) -> bool:
    """Whether all numbers in some JSON are finite, and none is so large that arithmetic would fail."""
    inside = [data]
    while inside:
        one = inside.pop()
        if isinstance(one, dict):
            inside += one.values()
        elif isinstance(one, list):
            inside += one
        elif isinstance(one, (int, float)) and not -MOST <= one < MOST:  # which NaN is not
            return False
    return True


def write_kept(path: Path, value: object) -> None:
    """Keep something for the next time. A home that can't be written to costs a few seconds each time, no more."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in folders_above(path):
            folder.chmod(stat.S_IRWXU)
        with drafted(path) as draft:
            draft.chmod(stat.S_IRUSR | stat.S_IWUSR)
            draft.write_bytes(sealed(to_json(value)))


def folders_above(path: Path) -> list[Path]:
    """The folders of ours in which a cache lies: those up to `cache_folder`."""
    place = cache_folder()
    return [one for one in path.parents if one == place or place in one.parents]


def only_ours(found: os.stat_result) -> bool:
    """Whether nobody but this user, and root, owns or may write to something."""
    return found.st_uid in (0, os.getuid()) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
