"""Cached facts about this machine: small JSON files in the user's cache folder.

They only save time: a file that is damaged, unreadable, of another shape or not regular (a pipe, a device) counts as
missing, and its content is measured again. Each is sealed, and is written complete or not at all. A seal shows damage;
anybody could write another file with a valid one, so values are checked too.
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
MOST = 1 << 63  # larger than any figure of ours


def cache_folder() -> Path:
    """The folder for caches: $XDG_CACHE_HOME, or ~/.cache if that is unset or not absolute, as its specification
    says."""
    for place in (os.environ.get("XDG_CACHE_HOME", ""), os.path.join(os.path.expanduser("~"), ".cache")):
        if os.path.isabs(place):
            return Path(place) / "shoestring"
    return Path(os.devnull) / "shoestring"  # a user without a home: nothing can be cached


def read_kept(path: Path, kind: type[T]) -> T | None:
    """The value in a cache file; None if there is none, or the file is damaged."""
    try:
        found, whole = unsealed(read_regular(path))
    except (OSError, ValueError):  # ValueError: Damaged, or an impossible path
        return None
    return value_of(kind, found) if whole else None


def value_of(kind: type[T], data: Any) -> T | None:
    """A value from cached JSON; None if the JSON does not fit."""
    if not all_bounded(data):
        return None
    try:
        return from_json(kind, data)
    except Exception:  # a class may check its values and raise anything
        return None


def all_bounded(data: Any) -> bool:
    """Whether all numbers in some JSON are finite and small enough for arithmetic."""
    inside = [data]
    while inside:
        one = inside.pop()
        if isinstance(one, dict):
            inside += one.values()
        elif isinstance(one, list):
            inside += one
        elif isinstance(one, (int, float)) and not -MOST <= one < MOST:  # also false for NaN
            return False
    return True


def write_kept(path: Path, value: object) -> None:
    """Cache a value. If the folder can't be written to, the value is measured again each time, which takes seconds."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, sealed(to_json(value)))
