"""A room, as the planner sees it: its catalogue, its objective, and how a candidate is confirmed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from shoestring.core.budget import Budget
from shoestring.core.exactness import Exactness
from shoestring.core.figures import Quantity
from shoestring.core.technique import Technique
from shoestring.planning.plan import Plan, techniques_text


class HasNumbers(Protocol):
    """Anything with numbers by name: a cost, a candidate, a plan."""

    def numbers(self) -> Mapping[str, float]: ...


TIED = 0.02  # of the objective: candidates this close to the best count as equally good
T = TypeVar("T", bound=Technique[Any, Any])  # the room's techniques
C = TypeVar("C", bound=HasNumbers)  # its cost
P = TypeVar("P", bound=Plan[Any, Any])  # its plans


@dataclass(frozen=True)
class Candidate(Generic[T, C]):
    """An allowed combination of techniques, with its cost by arithmetic."""

    techniques: tuple[T, ...]
    cost: C
    exactness: Exactness
    known: Mapping[str, float]  # the cost's numbers

    def numbers(self) -> Mapping[str, float]:
        return self.known

    def __str__(self) -> str:
        return techniques_text(self.techniques)


class Room(ABC, Generic[T, C, P]):
    """Base class of a room. `catalogue`, `objective` and `confirm` must be given; the rest are defaults."""

    catalogue: tuple[type[T], ...]
    objective: Quantity  # the number of its costs to minimise

    good: ClassVar[str] = "good"  # what people call a good objective: as fast, no faster, slower
    better: ClassVar[str] = "better"
    worse: ClassVar[str] = "worse"
    arithmetic: ClassVar[str] = "by arithmetic"  # how a candidate's numbers are known before it is confirmed,
    real: ClassVar[str] = "when tried"  # and after
    subject: ClassVar[str] = "this model"
    phrases: ClassVar[Mapping[str, str]] = {}  # number's name -> its phrase in a sentence, such as "{} a step"

    idle: ClassVar[float] = 0.0  # fraction of a budget below which needing less is no advantage

    @property
    def noise(self) -> float:
        """Fraction by which the measured objective of two equally good plans may differ."""
        return TIED

    @abstractmethod
    def confirm(self, one: Candidate[T, C]) -> P:
        """The candidate as a plan, tried on the real subject. Raises Mistake with the reason if it can't be used."""

    @abstractmethod
    def sketch(self, one: Candidate[T, C]) -> P:
        """The candidate as a plan, by arithmetic alone."""

    def clash(self, one: T, other: T) -> str:
        """Why two techniques can't be combined; empty if they can."""
        return f"{type(one).__name__} twice: choose one of its settings" if type(one) is type(other) else ""

    def complete(self, techniques: tuple[T, ...], cost: C) -> bool:
        """Whether these techniques form a plan, or only the beginning of one."""
        return True

    def begin(self, ranked: Sequence[Candidate[T, C]]) -> None:
        """Called before the best of a ranking are confirmed."""

    def known_by_rule(self, one: Candidate[T, C]) -> bool:
        """Whether arithmetic is nearly right for a candidate. If there are such, only they are confirmed among the
        least demanding."""
        return True

    def worth(self, one: Candidate[T, C]) -> bool:
        """Whether a candidate is worth the time to confirm it."""
        return True

    def errs_like(self, one: Candidate[T, C]) -> Hashable:
        """A key: candidates with the same key are assumed to have the same arithmetic error."""
        return families(one.techniques)

    def confirm_again(self, one: Candidate[T, C], plan: P, budget: Budget) -> P:
        """A plan that keeps the budget, confirmed a second time if it is close to a limit."""
        return plan

    def needless(self, plan: P, budget: Budget) -> str:
        """Why a plan that keeps the budget should still not be chosen; empty if nothing speaks against it."""
        return ""

    def complete_figures(self, plan: P) -> P:
        """A plan that breaks the budget and will be shown, with figures that were skipped because it broke the budget."""
        return plan

    def culprit(self, techniques: tuple[T, ...]) -> frozenset[str]:
        """The families whose combination fails whenever this one does."""
        return families(techniques)

    def concerns(self, kind: type[T]) -> bool:
        """Whether to tell the user why a kind of technique can't be used."""
        return True

    def why_inexact(self, one: T, cost: C) -> str:
        """Why it is less exact here than elsewhere, in brackets; empty if it is not."""
        return ""

    def why_none(self, cost: C) -> str:
        """Why no combination at all is allowed."""
        return "no combination of techniques is allowed here"

    def hint(self) -> str:
        """What else may help a user whose budget is too small."""
        return ""


def families(techniques: Iterable[Technique[Any, Any]]) -> frozenset[str]:
    return frozenset(one.family for one in techniques)
