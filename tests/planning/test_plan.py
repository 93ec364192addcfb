"""A plan's file: what is written is read back as an equal plan, whatever room it is of."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from shoestring.core.errors import Mistake
from shoestring.core.exactness import Exactness
from shoestring.core.figures import Quantity
from shoestring.core.files.codec import Unreadable
from shoestring.core.technique import Technique, technique_from
from shoestring.planning.plan import LARGEST, WORDS, Outcome, Plan, read_plan

SIZE, LOST = Quantity("size_bytes", "size", counted=True), Quantity("letters_lost", "letters lost", "letters")


@dataclass(frozen=True)
class Trim(Technique[str, float]):
    to: int = 50

    order: ClassVar[int] = 10
    why: ClassVar[str] = "the end is left out"

    def cost(self, now: float) -> float:
        return now * self.to / 100

    def apply(self, words: str) -> str:
        return words[: len(words) * self.to // 100]


@dataclass(frozen=True)
class Kept:
    by: tuple[str, ...] = ()


PLAN = Plan(
    (Trim(75),),
    Exactness.CHANGED,
    {"size_bytes": 14.0, "letters_lost": math.inf},
    Kept(("a", "b")),
    "a trial",
    ("hot",),
)


def read(file: Mapping[str, Any]) -> Plan[Trim, Kept]:
    return read_plan(file, partial(technique_from, catalogue=(Trim,)), (SIZE, LOST), Kept)


def file_of(**changed: Any) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(json.dumps(Outcome(PLAN).as_json()))
    return told | {"chosen": told["chosen"] | changed}


def test_what_is_saved_is_read_back_as_an_equal_plan(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    again = read(json.loads((tmp_path / "plan.json").read_text()))
    assert again == PLAN and again.warnings == ("hot",) and again.predicted["letters_lost"] == math.inf


def test_an_outcome_has_the_plans_that_lost_with_why_and_as_one_would_write_them() -> None:
    told = Outcome(PLAN, PLAN, runners_up=((PLAN, "larger"),)).as_json()
    (lost,) = told["runners_up"]
    assert (lost["lost"], lost["text"], lost["size_bytes"]) == ("larger", "Trim(to=75)", 14.0)


@pytest.mark.parametrize("word", sorted(WORDS))
def test_a_figure_can_not_be_called_as_something_else_in_the_file(word: str) -> None:
    with pytest.raises(ValueError, match=f"a figure is called '{word}'"):
        PLAN.predicting(**{word: 1.0})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"size_bytes": -1}, "size_bytes is -1"),
        ({"size_bytes": LARGEST}, "size_bytes is"),
        ({"size_bytes": True}, "size_bytes is True"),
        ({"size_bytes": "14"}, "size_bytes is 14"),
        ({"exactness": "fine"}, "exact"),
        ({"details": {"by": 3}}, "by is 3"),
        ({"techniques": 5}, "TypeError"),
    ],
)
def test_a_file_that_says_what_can_not_be_is_refused(changed: Mapping[str, Any], said: str) -> None:
    with pytest.raises(Unreadable, match=said):
        read(file_of(**changed))


def test_another_version_and_techniques_of_other_rooms_are_refused_in_a_sentence() -> None:
    with pytest.raises(Unreadable, match="it is of version 2, and this shoestring reads 3: plan again"):
        read(file_of() | {"shoestring": 2})
    with pytest.raises(Mistake, match="no technique is called 'Checkpoint'"):
        read(file_of(techniques=[{"name": "Checkpoint", "knobs": {}}]))
