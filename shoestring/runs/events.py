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

A line ends with the CRC-32 of what is before it. A damaged line is skipped and counted; so is one that lacks what its kind needs, so that
nobody who reads events has to ask whether it is there. Lines of the version before have no CRC and are known by their spaces.
"""
from __future__ import annotations

import json
import os
import time
from binascii import crc32
from pathlib import Path
from typing import Any, NamedTuple

from shoestring.core.regular import regular

NAME = "events.jsonl"
BEFORE = b'{"event": "'                     # how a line of the version before begins; now there is no space
CRC = len(',"crc":"01234567"}')             # bytes at the end of a line
PIECE = 1 << 24                             # bytes that are read at once
MOST = 1 << 63                              # no figure is as large
WHOLE, NUMBER = (int,), (int, float)
# What the events of a kind must have to be used: name, types, and what it means if it is missing (None: that it can't be used).
NEEDED: dict[str, tuple[tuple[str, tuple[type, ...], int | None], ...]] = {
    "begun": (("steps", WHOLE, None), ("step", WHOLE, None)),
    "step": (("step", WHOLE, None), ("loss", NUMBER, None), ("seconds", NUMBER, None), ("process", WHOLE, None), ("most", WHOLE, None),
             ("moved", WHOLE, 0), ("sent", WHOLE, 0)),
    "measured": (("peak_bytes", WHOLE, None),),
    "saved": (("step", WHOLE, None),),
}


class Found(NamedTuple):
    """What was read of a run's events."""

    events: list[dict[str, Any]]
    offset: int      # after the last whole line
    damaged: int     # lines that were skipped
    rest: int        # bytes of a line without an end: it is being written, or its writer died
    wrong: str = ""  # why the file can't be read at all


def line_of(event: dict[str, Any]) -> bytes:
    """An event as a line, without its end."""
    head = json.dumps(event, separators=(",", ":")).encode()[:-1]
    return head + b',"crc":"%08x"}' % crc32(head)


def json_of(line: bytes) -> bytes:
    """The JSON of a line; nothing if its CRC does not fit."""
    if line.startswith(BEFORE):
        return line
    head = line[:-CRC]
    return head + b"}" if line[-CRC:] == b',"crc":"%08x"}' % crc32(head) else b""


def events_of(lines: list[bytes]) -> list[dict[str, Any]]:
    """The events of lines, without those that are damaged.

    >>> whole = line_of({"event": "warning", "time": 1.5, "text": "hot"})
    >>> events_of([whole, whole.replace(b"hot", b"hit"), b'{"event":"warning","time":1.5}', whole])
    [{'event': 'warning', 'time': 1.5, 'text': 'hot'}, {'event': 'warning', 'time': 1.5, 'text': 'hot'}]
    """
    found = [text for text in map(json_of, lines) if text]
    together = parsed(b"[" + b",".join(found) + b"]")   # twice as fast as one by one
    events = together if isinstance(together, list) and len(together) == len(found) else [parsed(text) for text in found]
    return [event for event in events if is_complete(event)]


def parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def is_complete(event: Any) -> bool:
    """Whether an event has what those who read it rely on."""
    if type(event) is not dict or type(event.get("time")) not in NUMBER or type(event.get("event")) is not str:
        return False
    for name, kinds, default in NEEDED.get(event["event"], ()):
        value = event.get(name, default)
        if type(value) not in kinds or (type(value) is int and not -MOST <= value < MOST):
            return False
    return True


class Events:
    """Appends to a run's events. A full disk loses events, never the run."""

    def __init__(self, folder: Path) -> None:
        self.file = regular(folder / NAME, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        size = os.fstat(self.file).st_size
        self.torn = size > 0 and os.pread(self.file, 1, size - 1) != b"\n"   # somebody died in the middle of a line

    def add(self, kind: str, **fields: Any) -> dict[str, Any]:
        event = {"event": kind, "time": time.time()} | fields
        line = b"\n" * self.torn + line_of(event) + b"\n"
        try:
            self.torn = os.write(self.file, line) < len(line)
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


def read(folder: Path, offset: int = 0, most: int = -1) -> Found:
    """The events from a position in the file on, up to the last whole line; at most about `most` bytes of them."""
    try:
        with open(folder / NAME, "rb", opener=regular) as file:
            file.seek(offset)
            data = file.read(most)
            if data and most > 0 and b"\n" not in data:   # a line that is longer
                data += file.readline()
    except FileNotFoundError:
        return Found([], offset, 0, 0)
    except OSError as error:
        return Found([], offset, 0, 0, f"{NAME} can't be read: {error}")
    size = data.rfind(b"\n") + 1
    lines = [line for line in data[:size].split(b"\n") if line]
    events = events_of(lines)
    return Found(events, offset + size, len(lines) - len(events), len(data) - size)


def course(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps as they count: what was done again after a resume stands in place of what was lost."""
    steps: dict[int, dict[str, Any]] = {}
    for event in events:
        if event["event"] == "begun":
            steps = {number: step for number, step in steps.items() if number <= event["step"]}
        elif event["event"] == "step":
            steps[event["step"]] = event
    return [steps[number] for number in sorted(steps)]
