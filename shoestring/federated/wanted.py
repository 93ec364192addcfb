"""What is asked of a federation, checked. Nothing heavy is imported: a wrong flag is told at once."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoestring.core.budget import Budget
from shoestring.core.errors import Mistake
from shoestring.core.extras import require
from shoestring.core.statistics import Statistics

Wanted = Mapping[str, Any]   # what is asked for, by the names of `NAMES`; None: it is not
NAMES = ("clients", "per_round", "rounds", "processes", "every", "upload", "download", "time", "epsilon", "delta", "statistics")


def checked(wanted: Wanted) -> dict[str, Any]:
    """What is asked for, as numbers; what can't be is refused."""
    found = {name: wanted.get(name) for name in NAMES}
    budget = Budget.parsed(up=found["upload"], down=found["download"], seconds=found["time"], epsilon=found["epsilon"],
                           delta=found["delta"])
    if budget.epsilon is not None and budget.delta is None:
        raise Mistake(f"--epsilon {found['epsilon']} is a privacy loss at a chance of a greater one: give --delta too, below one in the "
                      f"number of clients, such as --delta 1e-6")
    if budget.epsilon is None and budget.delta is not None:
        raise Mistake(f"--delta {found['delta']} goes with --epsilon: give both")
    if budget.delta is not None and not 0 < budget.delta < 1:
        raise Mistake(f"--delta {found['delta']}: give a chance above 0 and below 1, such as 1e-6")
    if budget.epsilon is not None and not budget.epsilon > 0:
        raise Mistake(f"--epsilon {found['epsilon']}: give a number above 0")
    if found["statistics"] not in (None, *Statistics):
        raise Mistake(f"--statistics {found['statistics']}: give one of {', '.join(Statistics)}")
    if budget.epsilon is not None:
        require("private")
    return found | {"upload": budget.up, "download": budget.down, "time": budget.seconds, "epsilon": budget.epsilon, "delta": budget.delta}
