"""Plans and outcomes, one class each for all rooms, and how they are written to files and read back.

A room adds its own data as `details`: a frozen dataclass that the codec writes (where a model is cut, how devices are
simulated).

    {"shoestring": 3,
     "chosen": {"techniques": [{"name", "knobs", "why"}], "exactness": "to rounding", "process_bytes": 1024, ...,
                "basis": "...", "warnings": [], "details": {...}},
     "plain": {...}, "runners_up": [{..., "lost": "why", "text": "as one would write it"}], ...}

Contract: what `Plan.save` writes, `read_plan` reads back as an equal plan (tests/test_room_from_outside.py). Figures have
the names of the room's quantities; null stands for infinity.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from shoestring.core.budget import Budget
from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness, stated_in
from shoestring.core.figures import Quantity
from shoestring.core.files.codec import Unreadable, finite_json, from_json, to_json
from shoestring.core.files.files import write_whole
from shoestring.core.technique import Technique, in_order, technique_json, text

VERSION = 3  # of plan files
LARGEST = 1 << 62  # no figure is as large
# What stands beside figures in a plan's JSON, so that no figure may be called so
WORDS = frozenset({"techniques", "exactness", "basis", "warnings", "details", "lost", "text"})

T = TypeVar("T", bound=Technique[Any, Any])  # the room's techniques
D = TypeVar("D")  # what the room adds to a plan
P = TypeVar("P", bound="Plan[Any, Any]")


def techniques_text(techniques: Sequence[Technique[Any, Any]]) -> str:
    """Techniques as written in `--use`, joined by " + "."""
    return " + ".join(map(text, techniques)) or "plain"


@dataclass(frozen=True)
class Plan(Generic[T, D]):
    """Techniques in their order and the figures that are predicted with them. `save` writes it to a file, and
    `shoestring train --plan FILE` replays it."""

    techniques: tuple[T, ...]
    exactness: Exactness  # how close the result stays to that of the plain subject
    predicted: Mapping[str, float]  # quantity name -> value
    details: D
    basis: str = ""  # where the figures come from, for people
    warnings: tuple[str, ...] = field(default=(), compare=False)  # what the user should know before using it
    made_for: object = field(default=None, compare=False, repr=False)  # the job, in this process; None: not known

    def __post_init__(self) -> None:
        if taken := sorted(WORDS & self.predicted.keys()):
            raise ValueError(f"a figure is called {taken[0]!r}, which is something else in a plan's file: rename it")

    def __str__(self) -> str:
        return techniques_text(self.techniques)

    def numbers(self) -> Mapping[str, float]:
        return self.predicted

    def predicting(self, **figures: float) -> Self:
        """The plan with these predictions replaced."""
        return replace(self, predicted={**self.predicted, **figures})

    def with_details(self, **details: Any) -> Self:
        """The plan with these details replaced."""
        changed: Any = replace(self.details, **details)  # type: ignore[type-var]
        return replace(self, details=changed)

    def as_json(self) -> dict[str, Any]:
        return {
            "techniques": [technique_json(one) | {"why": one.why} for one in self.techniques],
            "exactness": self.exactness.word,
            **finite_json(dict(self.predicted)),
            "basis": self.basis,
            "warnings": list(self.warnings),
            "details": finite_json(to_json(self.details)),
        }

    def save(self, path: Path) -> None:
        write_whole(path, json.dumps(Outcome(self).as_json(), indent=1).encode(), asked=True)


@dataclass(frozen=True)
class Outcome(Generic[P]):
    """The result of planning: the chosen plan, the alternatives, and why they lost."""

    chosen: P
    plain: P | None = None  # without techniques; None: the plan was given, nothing was planned
    asked: bool = False  # the user named the techniques
    runners_up: tuple[tuple[P, str], ...] = ()  # and why each lost
    more: tuple[P, ...] = ()  # what more budget would buy, the next step first
    refused: tuple[tuple[str, str], ...] = ()  # techniques that can't be used here, and why
    tried: int = 1
    fitting: int = 1  # number of candidates that fit by arithmetic
    budget: Budget = field(default_factory=Budget)
    seconds: float = 0.0  # planning time
    measured_at: float = 0.0  # when its evidence was measured, in seconds since 1970; 0: while planning
    draw: Callable[[Any], str] | None = field(default=None, compare=False, repr=False)  # its text for people

    def __str__(self) -> str:
        return str(self.chosen) if self.draw is None else self.draw(self)

    def as_json(self) -> dict[str, Any]:
        """The JSON that --json prints and a run stores."""
        found: dict[str, Any] = {"shoestring": VERSION, "chosen": self.chosen.as_json()}
        if self.plain is None:
            return found
        return found | {
            "plain": self.plain.as_json(),
            "runners_up": [plan.as_json() | {"lost": why, "text": str(plan)} for plan, why in self.runners_up],
            "more": [plan.as_json() for plan in self.more],
            "refused": [{"technique": name, "reason": why} for name, why in self.refused],
            "tried": self.tried,
            "fitting": self.fitting,
            "budget": {limit.name: limit.value for limit in self.budget.limits()},
            "seconds": self.seconds,
            "measured_at": self.measured_at,
        }


def read_plan(
    file: Mapping[str, Any],
    techniques: Callable[[str, Mapping[str, Any]], T],
    quantities: Sequence[Quantity],
    details: type[D],
) -> Plan[T, D]:
    """The chosen plan of a file. `techniques` makes a technique from its name and knobs. Raises Unreadable, or Mistake
    if a technique is none of the room's."""
    if file.get("shoestring") != VERSION:
        raise Unreadable(
            f"it is of version {str(file.get('shoestring'))[:40]}, and this shoestring reads {VERSION}: plan again"
        )
    try:
        chosen = dict(file["chosen"])
        made = in_order(techniques(str(one["name"]), dict(one["knobs"])) for one in chosen["techniques"])
        predicted = {one.name: number_in(chosen, one.name) for one in quantities if one.name in chosen}
        words = from_json(PlanWords, {name: chosen[name] for name in ("basis", "warnings") if name in chosen})
        exactness = stated_in(chosen)
        if exactness is None:
            raise Unreadable("it does not say how exact it is")
        return Plan(
            made, exactness, predicted, from_json(details, chosen.get("details", {})), words.basis, words.warnings
        )
    except (Mistake, Unreadable):
        raise
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise Unreadable(f"{type(error).__name__}: {str(error)[:200]}") from error


@dataclass(frozen=True)
class PlanWords:
    """The texts in a plan file."""

    basis: str = ""
    warnings: tuple[str, ...] = ()


def number_in(chosen: Mapping[str, Any], name: str) -> float:
    """A figure in a plan file."""
    value = chosen[name]
    if value is None:
        return math.inf
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < LARGEST:
        raise Unreadable(f"{name} is {str(value)[:40]}")
    return value
