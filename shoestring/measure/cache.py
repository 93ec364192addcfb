"""What was found out about this machine and is kept between runs: small JSON files in the user's cache folder.

They are a shortcut and nothing else: one that is damaged, unreadable or no regular file (a pipe, a device) counts as not there, and what
it would have said is found out again. Each is sealed, and is there whole or not at all.
"""
from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoestring.core.files import write_whole
from shoestring.core.regular import read_regular
from shoestring.core.seal import Damaged, sealed, unsealed


def cache_folder() -> Path:
    return Path(os.path.expanduser("~")) / ".cache" / "shoestring"


def read_kept(path: Path) -> dict[str, Any]:
    """What was kept in a file; empty where nothing was, or not what was written."""
    try:
        found, whole = unsealed(read_regular(path))
    except (OSError, Damaged):
        return {}
    return found if whole else {}


def write_kept(path: Path, data: dict[str, Any]) -> None:
    """Keep something for the next time. A home that can't be written to costs a few seconds each time, no more."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, sealed(data))
