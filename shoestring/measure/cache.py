"""What was found out about this machine and is kept between runs: small JSON files in the user's cache folder.

They are a shortcut and nothing else: one that is damaged, unreadable, of another shape or no regular file (a pipe, a device) counts as not
there, and what it would have said is found out again. Each is sealed, and is there whole or not at all. A seal shows damage; anybody could
write another file with one, so what is read is checked too.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from shoestring.core.codec import from_json, to_json
from shoestring.core.files import write_whole
from shoestring.core.regular import read_regular
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
        found, whole = unsealed(read_regular(path))
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
        write_whole(path, sealed(to_json(value)))
