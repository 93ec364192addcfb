"""Cached facts about this machine: small JSON files in the user's cache folder.

They only save time: a file that is damaged, unreadable, of another shape or not regular (a pipe, a device) counts as
missing, and its content is measured again. So does a file that another user (other than root) owns or may write to, or
that lies in such a folder of ours.

A believable wrong number can't be told from a right one by looking at it, so a file must be ours: its seal is keyed by a
secret of this user that is in no other file, by this machine and by the file's name. A cache that somebody sent, that was
copied from another machine or renamed is measured again (tests/measure/test_cache_key.py).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from shoestring.core.files.codec import from_json, to_json
from shoestring.core.files.files import draft_file
from shoestring.core.files.regular import read_regular, regular
from shoestring.core.files.seal import seal, unseal

T = TypeVar("T")
MOST = 1 << 63  # larger than any figure of ours
KEY, BYTES = "key", 32  # the secret's file in the cache folder, and its size


def cache_folder() -> Path:
    """The folder for caches: $XDG_CACHE_HOME, or ~/.cache if that is unset or not absolute, as its specification
    says."""
    for place in (os.environ.get("XDG_CACHE_HOME", ""), os.path.join(os.path.expanduser("~"), ".cache")):
        if os.path.isabs(place):
            return Path(place) / "shoestring"
    return Path(os.devnull) / "shoestring"  # a user without a home: nothing can be cached


def read_cached(path: Path, kind: type[T]) -> T | None:
    """The value in a cache file; None if there is none, or the file is damaged."""
    try:
        if not all(only_ours(os.stat(folder)) for folder in folders_above(path)):
            return None
        with open(path, "rb", opener=regular) as file:
            if not only_ours(os.fstat(file.fileno())) or not (secret := read_secret()):
                return None
            found, whole = unseal(file.read(), key=key_of(secret, path))
    except (OSError, ValueError):  # Damaged is one; a path that can't be is another
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


def write_cached(path: Path, value: object) -> None:
    """Cache a value. If the folder can't be written to, the value is measured again each time, which takes seconds."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in folders_above(path):
            folder.chmod(stat.S_IRWXU)
        write_private(path, seal(to_json(value), key_of(read_secret() or new_secret(), path)))


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only this user can read."""
    with draft_file(path) as draft:
        draft.chmod(stat.S_IRUSR | stat.S_IWUSR)
        draft.write_bytes(data)


# The secret


def read_secret() -> bytes:
    """This user's secret; empty if there is none, or somebody else may have read it or put it there."""
    place = cache_folder() / KEY
    try:
        found = os.lstat(place)
        if found.st_uid != os.getuid() or found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            return b""
        data = read_regular(place)
    except OSError:
        return b""
    return data if len(data) == BYTES else b""


def new_secret() -> bytes:
    """A secret from the operating system's generator; of two processes that make one at once, the later one's stays, and
    what the other wrote is measured again."""
    write_private(cache_folder() / KEY, secrets.token_bytes(BYTES))
    return read_secret()


def key_of(secret: bytes, path: Path) -> bytes:
    """The key of one file's seal, of this machine and this name alone."""
    name = os.path.relpath(path, cache_folder())
    return hmac.digest(secret, f"{machine_id()}\n{name}".encode(errors="surrogateescape"), hashlib.sha256)


@cache
def machine_id() -> str:
    """What systemd calls this machine; empty where nothing does. A container may have another one whenever it starts."""
    with suppress(OSError, ValueError):
        return read_regular("/etc/machine-id").decode().strip()
    return ""


def folders_above(path: Path) -> list[Path]:
    """The folders of ours in which a cache lies: those up to `cache_folder`."""
    place = cache_folder()
    return [one for one in path.parents if one == place or place in one.parents]


def only_ours(found: os.stat_result) -> bool:
    """Whether nobody but this user, and root, owns or may write to something."""
    return found.st_uid in (0, os.getuid()) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
