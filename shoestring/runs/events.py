"""The events of a run: one JSON object a line, only ever appended. What a run's page and report say comes from here.

Every event has `event` (its kind) and `time` (seconds since 1970):

    begun      pid, steps, step (the one it goes on from), how (where the data came from), world (of a group)
    step       step, loss, seconds, process (bytes now), most (bytes at most so far; of a group, of the largest process), moved, sent
    measured   peak_bytes, flops, where, parts    of the tensors, in the first two steps
    saved      step, checkpoint, seconds (that training stood still), bytes
    warning    text
    adopted    differences
    stopped    step, text        asked to, after saving
    finished   step
    planning   memory            the planner is at work
    failed     text              why it can't go on; a run that was killed says nothing
    died       rank, why (SIGKILL, exit code 1, no sign of life for 30 s), step, text      a worker of a group
    re-formed  world, seconds (since the first of such deaths), step, text                 the group goes on
"""
from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

NAME = "events.jsonl"


class Events:
    """Appends to a run's events. A full disk loses events, never the run."""

    def __init__(self, folder: Path) -> None:
        self.file = os.open(folder / NAME, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        size = os.fstat(self.file).st_size
        self.torn = size > 0 and os.pread(self.file, 1, size - 1) != b"\n"   # somebody died in the middle of a line

    def add(self, kind: str, **fields: Any) -> dict[str, Any]:
        event = {"event": kind, "time": time.time()} | fields
        line = ("\n" if self.torn else "") + json.dumps(event) + "\n"
        try:
            self.torn = os.write(self.file, line.encode()) < len(line.encode())
        except OSError:
            self.torn = True
        return event

    def close(self) -> None:
        os.close(self.file)


def note(folder: Path, kind: str, **fields: Any) -> None:
    """Append one event, from a process that has no more to say."""
    events = Events(folder)
    events.add(kind, **fields)
    events.close()


def read(folder: Path, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The events from a position in the file on, and the position after the last whole line."""
    try:
        with open(folder / NAME, "rb") as file:
            file.seek(offset)
            data = file.read()
    except OSError:
        return [], offset
    whole = data[: data.rfind(b"\n") + 1]
    found = []
    for line in whole.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and "event" in event:
            found.append(event)
    return found, offset + len(whole)


def course(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps as they count: what was done again after a resume stands in place of what was lost."""
    steps: dict[int, dict[str, Any]] = {}
    for event in events:
        if event["event"] == "begun":
            steps = {number: step for number, step in steps.items() if number <= event["step"]}
        elif event["event"] == "step":
            steps[event["step"]] = event
    return [steps[number] for number in sorted(steps)]
