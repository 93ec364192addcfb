"""The documentation of the federated room agrees with its source."""

from __future__ import annotations

import re
from pathlib import Path

from shoestring.federated.catalogue import CATALOGUE, CONFLICTS

ROOT = Path(__file__).parents[2]


def test_the_table_of_techniques_has_every_one_and_no_other() -> None:
    table = [line for line in (ROOT / "docs" / "federated.md").read_text().splitlines() if re.match(r"\| `[A-Z]", line)]
    written = set(re.findall(r"`(\w+)", " ".join(line.split("|")[1] for line in table)))
    assert written == {kind.__name__ for kind in CATALOGUE}


def test_conflicts_are_between_techniques_that_there_are() -> None:
    names = {kind.__name__ for kind in CATALOGUE}
    assert all(pair <= names and len(pair) == 2 and len(reason) > 30 for pair, reason in CONFLICTS.items())
