"""A room, as the chooser sees it: what it can choose among, what counts as better, and how a candidate is confirmed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from shoestring.core.budget import Budget
from shoestring.core.exactness import Exactness
from shoestring.core.figures import Quantity
from shoestring.core.technique import Technique
from shoestring.planning.plan import Plan, named


class HasNumbers(Protocol):
    """Whatever has numbers by name: a cost, a candidate, a plan."""

    def numbers(self) -> Mapping[str, float]: ...


TIED = 0.02  # of the objective: who is so close to the best is as good
T = TypeVar("T", bound=Technique[Any, Any])  # the room's techniques
C = TypeVar("C", bound=HasNumbers)  # its cost
P = TypeVar("P", bound=Plan[Any, Any])  # its plans


@dataclass(frozen=True)
class Candidate(Generic[T, C]):
    """A combination that is allowed, with what it costs by arithmetic."""

    techniques: tuple[T, ...]
    cost: C
    exactness: Exactness
    known: Mapping[str, float]  # the cost's numbers

    def numbers(self) -> Mapping[str, float]:
        return self.known

    def __str__(self) -> str:
        return named(self.techniques)


class Room(ABC, Generic[T, C, P]):
    """What a room says of itself. It has a `catalogue` and an `objective`, and confirms; the rest are defaults."""

    catalogue: tuple[type[T], ...]
    objective: Quantity  # a number of its costs; the less of it the better

    good: ClassVar[str] = "good"  # what people call that: as fast, no faster, slower
    better: ClassVar[str] = "better"
    worse: ClassVar[str] = "worse"
    arithmetic: ClassVar[str] = "by arithmetic"  # how a candidate's numbers are known before it is confirmed
    real: ClassVar[str] = "when tried"  # and how after
    subject: ClassVar[str] = "this model"
    phrases: ClassVar[Mapping[str, str]] = {}  # how a number by name stands in a sentence, such as "{} a step"

    idle: ClassVar[float] = 0.0  # share of a budget below which taking less of it is no merit

    @property
    def noise(self) -> float:
        """By which share the objective of two plans may differ that are as good: what is measured is never the same twice."""
        return TIED

    @abstractmethod
    def confirm(self, one: Candidate[T, C]) -> P:
        """The candidate as a plan, tried on the real subject. Raises Mistake with the reason where it can't be used."""

    @abstractmethod
    def sketch(self, one: Candidate[T, C]) -> P:
        """The candidate as a plan, by arithmetic alone."""

    def clash(self, one: T, other: T) -> str:
        """Why two techniques can't be combined; empty if they can."""
        return f"{type(one).__name__} twice: choose one of its settings" if type(one) is type(other) else ""

    def complete(self, techniques: tuple[T, ...], cost: C) -> bool:
        """Whether these techniques are a plan, or only the beginning of one."""
        return True

    def begin(self, ranked: Sequence[Candidate[T, C]]) -> None:
        """Called before the best of a ranking are confirmed."""

    def known_by_rule(self, one: Candidate[T, C]) -> bool:
        """Whether arithmetic is nearly right for it. Of the least demanding candidates only such are confirmed, if there are any."""
        return True

    def worth(self, one: Candidate[T, C]) -> bool:
        """Whether it is worth what confirming it takes."""
        return True

    def errs_like(self, one: Candidate[T, C]) -> Hashable:
        """Arithmetic that is wrong for one candidate is taken to be as wrong for others with the same answer here."""
        return families(one.techniques)

    def confirm_again(self, one: Candidate[T, C], plan: P, budget: Budget) -> P:
        """A plan that keeps the budget, looked at once more if it is close to it."""
        return plan

    def needless(self, plan: P, budget: Budget) -> str:
        """Why a plan that keeps the budget is not chosen all the same; empty if nothing speaks against it."""
        return ""

    def complete_figures(self, plan: P) -> P:
        """A plan that breaks the budget and is told of: with all its figures, if some were left out because of that."""
        return plan

    def culprit(self, techniques: tuple[T, ...]) -> frozenset[str]:
        """The families whose combination fails because this one does."""
        return families(techniques)

    def concerns(self, kind: type[T]) -> bool:
        """Whether the user is told why a kind of technique can't be used."""
        return True

    def why_inexact(self, one: T, cost: C) -> str:
        """What makes it less exact here than it is elsewhere, in brackets; empty if nothing does."""
        return ""

    def why_none(self, cost: C) -> str:
        """Why no combination at all is allowed."""
        return "no combination of techniques is allowed here"

    def hint(self) -> str:
        """What else may help whose budget is too small."""
        return ""


def families(techniques: Iterable[Technique[Any, Any]]) -> frozenset[str]:
    return frozenset(one.family for one in techniques)
