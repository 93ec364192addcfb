"""What of a run's flags changed, in words; and what they are when it goes on."""

from __future__ import annotations

from typing import Any

import pytest

from shoestring.runs.request import Request, differences
from shoestring.runs.resume import planning_options

USUAL = {"epochs": 5, "width": 64}


@pytest.mark.parametrize(
    ("before", "now", "said", "flags"),
    [
        ({}, {"epochs": 8}, ["--epochs changed: 5 before, now 8"], {"epochs": 8}),
        ({}, {"epochs": 5}, [], {"epochs": 5}),
        (
            {"width": 8},
            {"steps": 200},
            ["--steps changed: as the job says before, now 200"],
            {"width": 8, "steps": 200},
        ),
        (
            {"steps": 100},
            {"epochs": 8},
            [
                "--epochs changed: 5 before, now 8",
                "--steps was 100 and does not count any more, because --epochs is given alone",
            ],
            {"epochs": 8},
        ),
        ({"steps": 100, "width": 8}, {}, [], {"steps": 100, "width": 8}),
        ({"seed": 1}, {"seed": 2}, ["--seed changed: 1 before, now 2"], {"seed": 2}),
    ],
)
def test_flags_that_changed_are_told_with_both_values(
    before: dict[str, Any], now: dict[str, Any], said: list[str], flags: dict[str, Any]
) -> None:
    was, asked = Request(job="a.py", flags=before), Request(job="a.py", flags=now)
    assert differences(was, asked, USUAL) == said and planning_options(asked, was).flags == flags


def test_a_budget_is_told_as_a_size() -> None:
    assert differences(Request(job="a.py", memory=600 << 20), Request(job="a.py", memory=1 << 30)) == [
        "--memory changed: 600 MiB before, now 1.00 GiB"
    ]


def test_an_option_of_a_room_may_be_called_as_a_size_and_be_a_text() -> None:
    before, now = (Request(job="n.txt", room="tally", asked={"size": size}) for size in ("small", "large"))
    assert differences(before, now) == ["--size changed: small before, now large"]
