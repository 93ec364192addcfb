"""What is asked of a federation, checked. Nothing heavy is imported: a wrong flag is told at once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import inf, nan
from typing import Any

from shoestring.core.budget import Budget
from shoestring.core.errors import Mistake
from shoestring.core.extras import require
from shoestring.core.statistics import StatisticsRule

Wanted = Mapping[str, Any]  # what is asked for, by the names of `NAMES`; None: it is not
NAMES = (
    "clients",
    "per_round",
    "rounds",
    "processes",
    "every",
    "upload",
    "download",
    "time",
    "epsilon",
    "delta",
    "statistics",
    "ledger",
    "ledger_epsilon",
    "insecure_seed",
)
PRIVATE = ("ledger", "ledger_epsilon", "insecure_seed")  # what goes with epsilon; a task has a ledger without


def checked(wanted: Wanted) -> dict[str, Any]:
    """What is asked for, as numbers; what can't be is refused."""
    found = {name: wanted.get(name) for name in NAMES}
    budget = Budget.parsed(
        up=found["upload"],
        down=found["download"],
        seconds=found["time"],
        epsilon=found["epsilon"],
        delta=found["delta"],
    )
    if budget.epsilon is not None and budget.delta is None:
        raise Mistake(
            f"--epsilon {found['epsilon']} is a privacy loss at a chance of a greater one: give --delta too, below one in the "
            f"number of clients, such as --delta 1e-6"
        )
    if budget.epsilon is None and budget.delta is not None:
        raise Mistake(f"--delta {found['delta']} goes with --epsilon: give both")
    if budget.delta is not None and not 0 < budget.delta < 1:
        raise Mistake(f"--delta {found['delta']}: give a chance above 0 and below 1, such as 1e-6")
    if budget.epsilon is not None and not budget.epsilon > 0:
        raise Mistake(f"--epsilon {found['epsilon']}: give a number above 0")
    if found["statistics"] not in (None, *StatisticsRule):
        raise Mistake(f"--statistics {found['statistics']}: give one of {', '.join(StatisticsRule)}")
    if budget.epsilon is not None:
        require("private")
    found |= {
        "ledger": found["ledger"] and os.path.realpath(found["ledger"]),
        "insecure_seed": whole("--insecure-seed", found["insecure_seed"]),
        "ledger_epsilon": above_zero("--ledger-epsilon", found["ledger_epsilon"]),
    }
    return found | {
        "upload": budget.up,
        "download": budget.down,
        "time": budget.seconds,
        "epsilon": budget.epsilon,
        "delta": budget.delta,
    }


def check_private(found: Wanted) -> None:
    """Of a training: what is about privacy goes with epsilon."""
    for name in PRIVATE:
        if found[name] is not None and found["epsilon"] is None:
            raise Mistake(
                f"--{name.replace('_', '-')} {found[name]} goes with --epsilon: without it nothing is private, and no ledger is "
                f"kept"
            )


def whole(flag: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not str(value).isdecimal() or int(value) >= 1 << 63:
        raise Mistake(f"{flag} {value}: give a whole number, 0 or more")
    return int(value)


def above_zero(flag: str, value: Any) -> float | None:
    try:
        number = None if value is None else float(value)
    except (TypeError, ValueError):
        number = nan
    if number is not None and not 0 < number < inf:
        raise Mistake(f"{flag} {value}: give a number above 0")
    return number
