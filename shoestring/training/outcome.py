"""What the planner found, for people, for --json and for a run's plan.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoestring.core.codec import to_json
from shoestring.planning.quantities import VERSION
from shoestring.planning.room import named
from shoestring.training.plan import Plan, techniques_in


@dataclass(frozen=True)
class Outcome:
    """What planning found: the chosen plan, what it was chosen from, and why. `shoestring.plan` gives one that prints as a table."""

    chosen: Plan  # what `train` is given
    plain: Plan  # the same job without techniques
    runners_up: tuple[tuple[Plan, str], ...]  # and why each lost
    tried: int
    fitting: int
    seconds: float  # that planning took
    memory: int  # bytes of the budget
    more: tuple[Plan, ...]  # what more memory would buy, next first
    refused: tuple[tuple[str, str], ...]  # techniques that can't be used here, and why
    measured: float = 0.0  # when it was measured what this rests on, in seconds since 1970; 0: while planning

    def as_json(self) -> dict[str, Any]:
        picture = self.chosen.drawn() if self.chosen.mesh else {}
        return {
            "chosen": self.chosen.as_json() | picture,
            "plain": self.plain.as_json(),
            "memory": self.memory,
            "tried": self.tried,
            "fitting": self.fitting,
            "seconds": self.seconds,
            "lengths": to_json(self.chosen.lengths),
            "runners_up": [plan.as_json() | {"lost": why} for plan, why in self.runners_up],
            "more_memory": [plan.as_json() for plan in self.more],
            "refused": [{"technique": name, "reason": why} for name, why in self.refused],
            "measured_at": self.measured,
        }

    def as_file(self) -> dict[str, Any]:
        return plan_file(self.chosen, self.as_json())


def plan_file(chosen: Plan, outcome: Mapping[str, Any]) -> dict[str, Any]:
    """A plan as a run keeps it, once; `outcome` is the JSON of what it was chosen from, empty if it is replayed.

    `plan.plan_in` makes the plan of it again, `quantities.plan_summary` says what a page shows.
    """
    lost = [one | {"text": named(techniques_in(one["techniques"]))} for one in outcome.get("runners_up", ())]
    return {"shoestring": VERSION, "chosen": chosen.as_file(), "plain": outcome.get("plain", {}), "runners_up": lost}
