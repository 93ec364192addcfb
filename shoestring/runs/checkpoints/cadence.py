"""How often a run is saved. Imports nothing heavy, because the command line needs it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shoestring.core.errors import Mistake

SECONDS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True)
class Cadence:
    """Save after this many steps, or after this many seconds."""

    steps: int = 0  # 0: by time
    seconds: float = 60.0
    keep: int = 3  # number of checkpoints to keep, besides the best one


def cadence_of(save_every: int | str, keep: int = Cadence.keep) -> Cadence:
    """Parse what the user wrote: a number of steps or a time, and how many checkpoints to keep.

    >>> cadence_of(50), cadence_of("5m", keep=1)
    (Cadence(steps=50, seconds=60.0, keep=3), Cadence(steps=0, seconds=300.0, keep=1))
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|h)?", str(save_every).strip())
    if found is None or not float(found[1]) or (not found[2] and not found[1].isdigit()):
        raise Mistake(f"--save-every {str(save_every)!r}: write a number of steps (50) or a time (90s, 5m, 1h)")
    if keep < 1:
        raise Mistake(f"--keep {keep}: a run needs at least one checkpoint to go on from")
    if not found[2]:
        return Cadence(steps=int(found[1]), keep=keep)
    return Cadence(seconds=float(found[1]) * SECONDS[found[2]], keep=keep)
