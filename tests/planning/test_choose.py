"""The chooser knows nothing of training: a room from outside (boxes of books to be made smaller) uses it as it is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from shoestring.core.budget import Budget
from shoestring.core.errors import Mistake, OverBudget
from shoestring.core.exactness import Exactness
from shoestring.core.figures import Quantity
from shoestring.core.technique import Technique, applied
from shoestring.planning.choose import Chooser, best_or_asked, candidates, requested_candidate
from shoestring.planning.plan import Plan
from shoestring.planning.room import Candidate, Room

Books = tuple[str, ...]  # the subject: titles


@dataclass(frozen=True)
class Bulk:
    """What a box of books costs."""

    size: float  # bytes
    damage: float = 0.0

    def numbers(self) -> Mapping[str, float]:
        return {"size_bytes": self.size, "damage": self.damage}


@dataclass(frozen=True)
class Shrink(Technique[Books, Bulk]):
    by: int

    order: ClassVar[int] = 10
    why: ClassVar[str] = "smaller print"

    @classmethod
    def choices(cls, bulk: Bulk) -> tuple[Shrink, ...]:
        return cls(2), cls(4), cls(8)

    def cost(self, bulk: Bulk) -> Bulk:
        return replace(bulk, size=bulk.size / self.by, damage=bulk.damage + self.by)

    def apply(self, books: Books) -> Books:
        return tuple(title[: len(title) // self.by] for title in books)


@dataclass(frozen=True)
class Drop(Technique[Books, Bulk]):
    """Leave out half of the books."""

    order: ClassVar[int] = 20
    exact: ClassVar[bool] = False
    why: ClassVar[str] = "fewer books"

    def cost(self, bulk: Bulk) -> Bulk:
        return replace(bulk, size=bulk.size / 2, damage=bulk.damage + 1)

    def apply(self, books: Books) -> Books:
        return books[: len(books) // 2]


Box = Candidate[Technique[Books, Bulk], Bulk]
Boxed = Plan[Technique[Books, Bulk], None]


def boxed(one: Box, size: float = 1.0) -> Boxed:
    return Boxed(one.techniques, one.exactness, {**one.known, "size_bytes": one.known["size_bytes"] * size}, None)


PLAIN = boxed(requested_candidate((), Bulk(1000)))


class Shelf(Room[Technique[Books, Bulk], Bulk, Boxed]):
    catalogue = (Shrink, Drop)
    objective = Quantity("damage", "damage", "share")
    subject = "these books"

    def __init__(self, off: float = 1.0, breaks: tuple[str, ...] = ()) -> None:
        self.off, self.breaks = (
            off,
            breaks,
        )  # how much larger boxes are than by arithmetic; techniques that fail when they are tried
        self.tried: list[str] = []

    def confirm(self, one: Box) -> Boxed:
        self.tried.append(str(one))
        if any(type(technique).__name__ in self.breaks for technique in one.techniques):
            raise Mistake("the paper tears")
        return boxed(one, self.off)

    def sketch(self, one: Box) -> Boxed:
        return boxed(one)


ALL = (Exactness.CHANGED,)


def test_the_best_that_keeps_the_budget_is_chosen_and_the_others_are_explained() -> None:
    found = Chooser(Shelf(), Bulk(1000)).best(Budget(size=300), ALL, PLAIN)
    assert found.chosen.techniques == (Shrink(2), Drop()) and found.chosen.numbers() == {"size_bytes": 250, "damage": 3}
    assert [(str(one), why) for one, why in found.runners_up] == [("Shrink(by=4)", "33% worse")]
    assert [str(one) for one in found.more] == ["Shrink(by=2)", "Drop()", "plain"], "less damage, for more bytes"
    assert (found.tried, found.fitting, found.refused) == (8, 5, ())
    assert applied(found.chosen.techniques, ("ab", "cdef")) == ("a",)


def test_what_is_not_exact_enough_is_refused_with_the_reason() -> None:
    found = Chooser(Shelf(), Bulk(1000)).best(Budget(size=300), (Exactness.BITS,), PLAIN)
    assert found.chosen.techniques == (Shrink(4),)
    assert found.refused == (("Drop", "changed for these books: --inexact allows it"),)


def test_a_finalist_that_turns_out_larger_is_passed_over_and_told() -> None:
    found = Chooser(Shelf(off=1.3), Bulk(1000)).best(Budget(size=300), ALL, PLAIN)
    assert found.chosen.techniques == (Shrink(4), Drop())
    assert ("Shrink(by=2) + Drop()", "needs 325 B when tried, 25 B too much") in [
        (str(one), why) for one, why in found.runners_up
    ]


def test_one_failing_candidate_does_not_end_it_and_its_family_is_not_tried_again() -> None:
    room = Shelf(breaks=("Drop",))
    found = Chooser(room, Bulk(1000)).best(Budget(size=300), ALL, PLAIN)
    assert found.chosen.techniques == (Shrink(4),) and room.tried == ["Shrink(by=2) + Drop()", "Shrink(by=4)"]
    assert [(str(one), why) for one, why in found.runners_up] == [("Shrink(by=2) + Drop()", "the paper tears")]


def test_where_nothing_fits_the_least_demanding_is_told() -> None:
    with pytest.raises(
        OverBudget,
        match=r"nothing fits 50 B: 8 combinations were tried and the least that works is 63 B, "
        r"with Shrink\(by=8\) \+ Drop\(\) \(changed, damage 900 %\)",
    ):
        Chooser(Shelf(), Bulk(1000)).best(Budget(size=50), ALL, PLAIN)


def test_what_was_chosen_earlier_stays_unless_it_is_worse_by_more_than_noise() -> None:
    assert Chooser(Shelf(), Bulk(1000, damage=100)).best(
        Budget(size=300), ALL, PLAIN, earlier=(Shrink(4),)
    ).chosen.techniques == (Shrink(4),)
    assert Chooser(Shelf(), Bulk(1000)).best(Budget(size=300), ALL, PLAIN, earlier=(Shrink(4),)).chosen.techniques == (
        Shrink(2),
        Drop(),
    )


class Tidy(Drop):
    """Less damage by arithmetic, for nothing."""

    def cost(self, bulk: Bulk) -> Bulk:
        return replace(bulk, damage=bulk.damage - 10)


class Airy(Shelf):
    catalogue = (Tidy,)

    def __init__(self, damage: float) -> None:
        self.damage = damage

    def confirm(self, one: Box) -> Boxed:
        return boxed(one).predicting(size_bytes=260.0, damage=self.damage)  # larger than the books were


def test_a_plan_that_is_no_better_by_more_than_noise_gives_way_to_a_known_one_that_is_smaller() -> None:
    books = Bulk(250, damage=100)
    for damage, chosen, lost in (
        (99.0, "plain", ["no better than plain by more than noise (2%), and larger"]),
        (97.0, "Tidy()", []),
    ):
        plain = boxed(requested_candidate((), books))
        found = Chooser(Airy(damage), books).best(Budget(size=300), ALL, plain, known=(plain,))
        assert str(found.chosen) == chosen
        assert [why for one, why in found.runners_up if one.techniques] == lost


def test_thousands_of_candidates_are_enumerated_lazily_each_from_the_one_it_extends() -> None:
    room = Shelf()
    found = list(candidates(room.catalogue, Bulk(1000), Exactness.CHANGED, room.clash, room.complete))
    assert len(found) == 8 and all(one == requested_candidate(one.techniques, Bulk(1000)) for one in found)


def test_the_chooser_needs_no_torch() -> None:
    code = "import sys, shoestring.planning.choose, shoestring.planning.quantities; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("techniques", [None, (Drop(),)])
def test_a_limit_that_no_cost_has_a_figure_for_is_refused(techniques: tuple[Drop, ...] | None) -> None:
    """Nobody could tell whether it is kept, and it was taken for kept."""
    with pytest.raises(Mistake, match=r"no.* figure for the limit on latency \(latency_seconds\)"):
        best_or_asked(Chooser(Shelf(), Bulk(1000)), Budget(size=600, latency=0.1), PLAIN, techniques)
    assert best_or_asked(Chooser(Shelf(), Bulk(1000)), Budget(size=600), PLAIN, techniques).chosen.techniques
