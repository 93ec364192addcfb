"""What a run's events.jsonl says, as the JSON that stands there: tests are about what is on the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoestring.runs.events.event_log import read, record_of


def records(folder: Path) -> list[dict[str, Any]]:
    return list(map(record_of, read(folder).events))


def steps_in(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps as they count: what was done again after a resume stands in place of what was lost."""
    steps: dict[int, dict[str, Any]] = {}
    for event in told:
        if event["event"] == "begun":
            steps = {number: step for number, step in steps.items() if number <= event["step"]}
        elif event["event"] == "step":
            steps[event["step"]] = event
    return [steps[number] for number in sorted(steps)]
