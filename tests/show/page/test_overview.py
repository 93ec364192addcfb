"""The overview compares what runs were made with, not what somebody happened to type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoestring.runs.events.event import Planning
from shoestring.runs.events.event_log import note
from shoestring.runs.folder import Folder
from shoestring.runs.reports.report import report_of
from shoestring.runs.reports.report_json import report_json
from shoestring.runs.request import Request
from shoestring.show.page.overview import overview, summary


def row(path: Path, flags: dict[str, Any], arguments: dict[str, Any]) -> Any:
    path.mkdir()
    Folder(path).begin(Request(job="/my.py", flags=flags, arguments=arguments), b"")
    note(path, Planning(None))
    return summary(report_of(path), path.name)


def test_a_default_is_beside_the_value_that_another_run_was_given(tmp_path: Path) -> None:
    drawn = str(
        overview(
            [
                row(tmp_path / "a", {"lr": 0.01}, {"lr": 0.01, "width": 8}),
                row(tmp_path / "b", {}, {"lr": 0.001, "width": 8}),
            ]
        )
    )
    assert "All runs have width 8." in drawn and "0.001" in drawn and "0.01" in drawn


def test_of_a_run_that_did_not_note_its_arguments_nothing_is_claimed(tmp_path: Path) -> None:
    drawn = str(overview([row(tmp_path / "a", {"lr": 0.01}, {}), row(tmp_path / "b", {}, {})]))
    assert "All runs have" not in drawn


def test_the_report_has_the_arguments_and_the_flags(tmp_path: Path) -> None:
    row(tmp_path / "a", {"lr": 0.01}, {"lr": 0.01, "width": 8})
    told = report_json(report_of(tmp_path / "a"))
    assert told["flags"] == {"lr": 0.01} and told["arguments"] == {"lr": 0.01, "width": 8}
