"""A technique: a small frozen value with two pure functions, `cost` and `apply`.

It is generic over its *subject*, which it changes (a training run, a model to make smaller), and over the subject's
cost. A room has a base class for both, such as `training.technique.TrainingTechnique`; a technique inherits from that,
is a frozen dataclass whose fields are its knobs, and overrides the defaults that do not fit.

Contract: `apply` changes no field of the subject, the job or the links that it is given
(tests/training/test_technique.py). One number, `order`, sorts techniques for `cost` and `apply` alike
(decisions/003).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, is_dataclass
from functools import reduce
from typing import Any, ClassVar, Generic, Self, TypeVar

from shoestring.core.command_line.technique_syntax import call_of, check_knobs, check_name
from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness
from shoestring.core.files.codec import Unreadable, hints_of, make_value

S = TypeVar("S")  # the subject
C = TypeVar("C")  # its cost
LARGEST = 1 << 62  # no knob is as large


class Technique(ABC, Generic[S, C]):
    why: ClassVar[str]  # what it is good for, in a few words
    order: ClassVar[int] = 100  # its position among a plan's techniques, for `cost` and `apply` alike
    exact: ClassVar[bool] = True  # whether the result is unchanged, unless `exactness` is more precise
    on_request: ClassVar[bool] = False  # never chosen by the planner: used only if the user names it

    @abstractmethod
    def cost(self, cost: C, /) -> C:
        """The cost of the subject with this technique."""

    @abstractmethod
    def apply(self, subject: S, /) -> S:
        """The subject with this technique."""

    @classmethod
    def choices(cls, cost: C, /) -> tuple[Self, ...]:
        """The settings worth trying; empty if it is only used on request."""
        return () if cls.on_request else (cls(),)

    def refusal(self, cost: C, /) -> str:
        """Why it can't work here; empty if it can."""
        return ""

    def exactness(self, cost: C, /) -> Exactness:
        """How close the result stays to the result without it."""
        return Exactness.BITS if self.exact else Exactness.CHANGED

    def drift(self, cost: C, /) -> float:
        """For level `changed`: how far the result may drift, in the room's measure. Infinite: it states no bound."""
        return float("inf")

    @classmethod
    def settings_to_explain(cls, cost: C, /) -> tuple[Self, ...]:
        """If no setting can be used: the settings for which the user is told why."""
        return cls.choices(cost)

    @property
    def label(self) -> str:
        """This setting's name in the table of conflicts; the technique's own name stands for all settings."""
        return text(self)

    @property
    def conflict_names(self) -> tuple[str, ...]:
        """All its names in the table of conflicts: its own first, and names that a room gives to several techniques at
        once."""
        return (type(self).__name__, self.label)

    @property
    def family(self) -> str:
        """Settings of one family differ by a knob: they fail for the same reason, and a list of plans shows only one of
        them."""
        return type(self).__name__


def drift(technique: Technique[Any, C], cost: C) -> float:
    """The stated drift of a technique; 0 if it changes nothing."""
    return technique.drift(cost) if technique.exactness(cost) is Exactness.CHANGED else 0.0


def in_order(techniques: Iterable[T]) -> tuple[T, ...]:
    return tuple(sorted(techniques, key=lambda technique: technique.order))


def total_cost(techniques: Iterable[Technique[Any, C]], cost: C) -> C:
    return reduce(lambda now, technique: technique.cost(now), techniques, cost)


def applied(techniques: Iterable[Technique[S, Any]], subject: S) -> S:
    return reduce(lambda now, technique: technique.apply(now), techniques, subject)


T = TypeVar("T", bound=Technique[Any, Any])


def technique_json(technique: Technique[Any, Any]) -> dict[str, Any]:
    """A technique as plain data; `technique_from` makes it again."""
    knobs: dict[str, Any] = asdict(technique) if is_dataclass(technique) and not isinstance(technique, type) else {}
    return {"name": type(technique).__name__, "knobs": knobs}


def text(technique: Technique[Any, Any]) -> str:
    """A technique as it is written everywhere, `--use` included: its name and the knobs that differ from their
    defaults."""
    defaults: dict[str, Any] = (
        {field.name: field.default for field in fields(technique)} if is_dataclass(technique) else {}
    )
    knobs = {name: value for name, value in technique_json(technique)["knobs"].items() if value != defaults.get(name)}
    return f"{type(technique).__name__}({', '.join(f'{name}={value!r}' for name, value in knobs.items())})"


def technique_from(name: str, knobs: Mapping[str, Any], catalogue: Iterable[type[T]]) -> T:
    kinds = {kind.__name__: kind for kind in catalogue}
    check_name(name, kinds)
    kind: Any = kinds[name]
    check_knobs(name, knobs, [field.name for field in fields(kind)] if is_dataclass(kind) else [])
    try:
        check_types(kind, knobs)
        technique: T = kind(**knobs)
        return technique
    except (TypeError, Unreadable, ArithmeticError) as error:
        raise Mistake(f"{name} can't be made of {str(dict(knobs))[:200]}: {error}") from error


def check_types(kind: type, knobs: Mapping[str, Any]) -> None:
    """Refuse knobs of another type than declared, and numbers that are NaN or impossibly large."""
    hints = hints_of(kind) if is_dataclass(kind) else {}
    for name, value in knobs.items():
        several = (
            hints.get(name) is str and isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value)
        )
        if not several:  # a single name where several are allowed: the technique handles it
            make_value(hints.get(name, Any), value, False, name)
        if isinstance(value, (int, float)) and not -LARGEST < value < LARGEST:
            raise Unreadable(f"{name} is {str(value)[:40]}")


def parse_technique(written: str, catalogue: Iterable[type[T]]) -> T:
    """The technique that a user wrote, such as Checkpoint(every=2)."""
    name, knobs = call_of(written)
    return technique_from(name, knobs, catalogue)
