"""What is read off the catalogue's source is what the catalogue has, and a mistake gets the same words either way."""

from __future__ import annotations

from dataclasses import fields

import pytest

from shoestring.core.errors import Mistake
from shoestring.core.rooms import room_named
from shoestring.core.technique import parse_technique, text
from shoestring.planning.names import check_written, knobs_of, technique_files
from shoestring.training.catalogue import CATALOGUE
from tests.training.test_promises import ledger


def test_names_and_knobs_are_those_of_the_catalogue() -> None:
    room = room_named("training")
    found = {
        name: knobs_of(name, file) for name, file in technique_files(str(room.catalogue), str(room.import_root)).items()
    }
    assert found == {kind.__name__: [field.name for field in fields(kind)] for kind in CATALOGUE}  # type: ignore[arg-type]


def test_every_technique_worth_trying_can_be_written() -> None:
    for kind in CATALOGUE:
        for one in kind.choices(ledger("chain")):
            check_written(text(one), "shoestring.training")


@pytest.mark.parametrize(
    "written",
    [
        "Checkpont(every=2)",
        "Checkpoint(evry=2)",
        "FusedOptimizer(fast=True)",
        "Checkpoint(every=2",
        "Checkpoint(2)",
        "Checkpoint(every=two)",
        "",
        "3",
        "Checkpoint().cost",
        "nothing",
    ],
)
def test_a_mistake_is_told_of_in_the_same_words_without_importing_it(written: str) -> None:
    said = []
    for check in (
        lambda written: check_written(written, "shoestring.training"),
        lambda written: parse_technique(written, CATALOGUE),
    ):
        with pytest.raises(Mistake) as told:
            check(written)
        said.append(str(told.value))
    assert said[0] == said[1]
