"""What docs/compress.md says is there."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from shoestring.compression.catalogue import CATALOGUE

PAGE = (Path(__file__).parents[2] / "docs" / "compress.md").read_text()


def test_every_technique_is_in_the_table_with_its_knobs() -> None:
    for kind in CATALOGUE:
        line = next((one for one in PAGE.splitlines() if one.startswith(f"| `{kind.__name__}(")), "")
        knobs = line.partition("(")[2].partition(")")[0].split(", ")
        assert line and {one for one in knobs if one} <= {one.name for one in fields(kind)}, kind.__name__
        assert kind.why and kind.__doc__, kind.__name__


def test_what_the_chooser_takes_by_itself_is_said() -> None:
    taken = {
        kind.__name__
        for kind in CATALOGUE
        if not kind.on_request and "choices" not in vars(kind) and kind.seam == "storage"
    }
    assert taken == {"Half", "Quantize"} and "The planner chooses `Half` and `Quantize`" in PAGE
