"""How close the result stays to the one without techniques (trained weights, answers): four levels, each with one word
that is used everywhere.

The planner chooses plans of the level `changed` only if that is allowed (--inexact). Techniques that the user names, by
--use, in a plan file or in a script, are used at whatever level they have, and the plan states it; --exact refuses any
plan that is further from plain training, whoever chose it.

Plan, page, report, `verify`, JSON, help and messages take their words from here. Nothing heavy is imported, because
help uses it too.
"""

from __future__ import annotations

from enum import IntEnum

from shoestring.core.errors import Mistake

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


class Exactness(IntEnum):
    BITS = 0
    ROUNDING = 1
    DISTRIBUTION = 2
    CHANGED = 3

    @property
    def word(self) -> str:
        """The name of the level, for people and programs."""
        return WORDS[self]

    @property
    def phrase(self) -> str:
        """The word as a sentence has it: a plan is "of the same distribution"."""
        return f"of the {self.word}" if self is Exactness.DISTRIBUTION else self.word

    @property
    def meaning(self) -> str:
        """What the level guarantees, in a sentence."""
        return MEANINGS[self]

    @property
    def flag(self) -> str:
        """The command-line flag that allows it."""
        return "--inexact" if self is Exactness.CHANGED else f"--exact {self.name.lower()}"


WORDS = {
    Exactness.BITS: "same bits",
    Exactness.ROUNDING: "to rounding",
    Exactness.DISTRIBUTION: "same distribution",
    Exactness.CHANGED: "changed",
}
MEANINGS = {
    Exactness.BITS: "the result is the one without techniques, bit for bit",
    Exactness.ROUNDING: "the same arithmetic as without techniques in another order: it differs by rounding alone",
    Exactness.DISTRIBUTION: "dropout and the like draw other random numbers than without techniques, from the same distribution",
    Exactness.CHANGED: "the result is not the one without techniques",
}
ASKED = {
    level.name.lower(): level for level in (Exactness.BITS, Exactness.ROUNDING, Exactness.DISTRIBUTION)
}  # the values of --exact
RENAMED = {"draws": "distribution"}  # earlier names of levels


def rename_hint(exact: str) -> str | None:
    """The message for an earlier name of a level; None if there was no such level.

    >>> rename_hint("draws"), rename_hint("bytes")
    ("'draws' is called 'distribution' now", None)
    """
    return f"{exact!r} is called {RENAMED[exact]!r} now" if exact in RENAMED else None


def allowed_levels(exact: str | None, inexact: bool) -> tuple[Exactness, ...]:
    """The levels to plan for, in turn, until a plan fits; a plan for a level may be of any closer level.

    >>> [[level.word for level in allowed_levels(*asked)] for asked in ((None, False), ("bits", False), (None, True))]
    [['to rounding', 'same distribution'], ['same bits'], ['changed']]
    """
    if exact and exact not in ASKED:
        raise Mistake(f"exact={exact!r}: " + (rename_hint(exact) or f"there are {', '.join(ASKED)}"))
    if exact and inexact:
        raise Mistake(
            f"--exact {exact} asks for {ASKED[exact].word} and --inexact allows {Exactness.CHANGED.word}: give one of them"
        )
    if inexact:
        return (Exactness.CHANGED,)
    return (ASKED[exact],) if exact else (Exactness.ROUNDING, Exactness.DISTRIBUTION)


def check_level(level: Exactness, exact: str | None, plan: str) -> None:
    """Refuse a plan that is further from plain training than `exact` allows."""
    if exact and level > ASKED[exact]:
        raise Mistake(
            f"{plan} is {level.phrase} for this job ({level.meaning}), and --exact {exact} allows {ASKED[exact].word}: leave it "
            f"out, or give {level.flag}"
        )


def stated_in(plan: Mapping[str, Any]) -> Exactness | None:
    """The level that a plan's JSON states; None if it states none.

    >>> stated_in({"exactness": "same distribution"}).name
    'DISTRIBUTION'
    """
    word = plan.get("exactness")
    return next((level for level in Exactness if level.word == word), None)
