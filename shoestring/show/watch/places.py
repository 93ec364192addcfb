"""What can be watched: a run's folder, or a folder of such folders. Imports nothing heavy, so a wrong name is reported
at once."""

from __future__ import annotations

import os

from shoestring.core.errors import Mistake

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path


def is_run(path: str | Path) -> bool:
    """Whether a folder is a run's."""
    return os.path.isfile(os.path.join(path, "run.json"))


def check(path: str | Path) -> None:
    """Refuse a path that can't be watched."""
    if not os.path.exists(path):
        raise Mistake(f"there is no {path}: give the folder of a run, as `shoestring train` prints it")
    if not os.path.isdir(path):
        raise Mistake(
            f"{path} is a file: give the folder of the run it belongs to, perhaps {os.path.dirname(path) or '.'}"
        )
    if not is_run(path) and not any(is_run(os.path.join(path, name)) for name in os.listdir(path)):
        raise Mistake(
            f"{path} holds no run.json, and no folder in it does: give the folder of a run, as `shoestring train` prints it"
        )
