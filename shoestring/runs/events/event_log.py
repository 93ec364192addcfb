"""The event file of a run: one JSON object per line, append-only. Pages and reports are made from it.

    {"event":"step","time":1794907085.6,"step":8,"loss":2.25,"seconds":0.3,"process":320974848,"most":320974848,"crc":"4e11ed3a"}

Kinds and fields are defined in runs/events/event.py. Every line ends with the CRC-32 of what precedes it. Damaged lines, and
lines that lack a required field, are skipped and counted, so readers of events need not check fields.
"""

from __future__ import annotations

import json
import os
import time
import weakref
from binascii import crc32
from dataclasses import fields, replace
from functools import cache
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

from shoestring.core.files.codec import Unreadable, finite_json, from_json
from shoestring.core.files.regular import regular
from shoestring.core.rooms import installed_rooms
from shoestring.runs.events.event import KINDS, Event, Other, Stepped

NAME = "events.jsonl"
CRC = len(',"crc":"01234567"}')  # bytes at the end of a line
PIECE = 1 << 24  # bytes per read
MOST = 1 << 63  # no figure is larger
WHOLE, NUMBER = (int,), (int, float)
# A step record's required fields: name, types, and the value assumed if it is missing (None: the record is unusable).
# There may be a million steps of which only the numbers are needed, so they stay dicts until somebody wants events.
NEEDED: tuple[tuple[str, tuple[type, ...], int | None], ...] = (
    ("step", WHOLE, None),
    ("loss", NUMBER, None),
    ("seconds", NUMBER, None),
    ("process", WHOLE, None),
    ("most", WHOLE, None),
    ("moved", WHOLE, 0),
    ("sent", WHOLE, 0),
    ("epoch", WHOLE, 0),
    ("rate", NUMBER, 0),
    ("norm", NUMBER, 0),
    ("held_up", NUMBER, 0),
)

# There may be a million steps, and only their figures are wanted, so they stay records (dicts) until somebody wants them as events.
StepRecord = dict[str, Any]


class EventsRead(NamedTuple):
    """The result of reading a run's events."""

    events: list[Event]
    offset: int  # position after the last complete line
    damaged: int  # number of skipped lines
    rest: int  # bytes of an incomplete last line: being written, or its writer died
    wrong: str = ""  # why the file can't be read at all


class FoundRecords(NamedTuple):
    """The same, with step records as dicts."""

    events: list[Event | StepRecord]
    offset: int
    damaged: int
    rest: int
    wrong: str = ""


USUAL: dict[type[Event], dict[str, Any]] = {}  # cache of `usual_values`


def usual_values(kind: type[Event]) -> dict[str, Any]:
    """A kind's fields that are not written while they have these default values."""
    if kind not in USUAL:
        USUAL[kind] = {one.name: one.default for one in fields(kind) if one.metadata.get("left out")}
    return USUAL[kind]


@cache
def kinds_of_rooms() -> dict[str, type[Event]]:
    """The kinds added by rooms. The first with a name wins, and none replaces a common kind."""
    found: dict[str, type[Event]] = {}
    for room in installed_rooms():
        for kind in room.events():
            found.setdefault(kind.kind, kind)
    return found


def record_of(event: Event) -> dict[str, Any]:
    """An event as JSON.

    >>> from shoestring.runs.events.event import Begun
    >>> record_of(Begun(pid=7, steps=9, step=0, how="from the beginning", time=1.5))
    {'event': 'begun', 'time': 1.5, 'pid': 7, 'steps': 9, 'step': 0, 'how': 'from the beginning'}
    """
    if isinstance(event, Other):
        return dict(event.told)
    usual = usual_values(type(event))
    record: dict[str, Any] = {"event": event.kind, "time": event.time}
    for name, value in vars(event).items():
        if name != "time" and not (name in usual and value == usual[name]):
            record[name] = list(value) if type(value) is tuple else value
    return record


def event_of(record: dict[str, Any]) -> Event | None:
    """The event in a JSON record; None if it lacks a required field."""
    kind = KINDS.get(record["event"]) or kinds_of_rooms().get(record["event"])
    if kind is None:
        return Other(record, time=record["time"])
    try:
        return from_json(kind, record, unknown="ignored")
    except Unreadable:
        return None


def line_of(record: dict[str, Any]) -> bytes:
    """A record as a line, without the newline."""
    try:
        text = json.dumps(record, separators=(",", ":"), allow_nan=False)
    except ValueError:  # NaN or infinity, such as the loss of a step without samples
        text = json.dumps(finite_json(record), separators=(",", ":"))
    head = text.encode()[:-1]
    return head + b',"crc":"%08x"}' % crc32(head)


def json_of(line: bytes) -> bytes:
    """The JSON of a line; empty if its CRC does not match."""
    head = line[:-CRC]
    return head + b"}" if line[-CRC:] == b',"crc":"%08x"}' % crc32(head) else b""


def events_of(lines: list[bytes]) -> list[Event | StepRecord]:
    """The events in these lines; damaged ones are left out.

    >>> whole = line_of({"event": "warning", "time": 1.5, "text": "hot"})
    >>> events_of([whole, whole.replace(b"hot", b"hit"), b'{"event":"warning","time":1.5}'])
    [Warned(time=1.5, text='hot')]
    """
    found = [text for text in map(json_of, lines) if text]
    together = parse_json(b"[" + b",".join(found) + b"]")  # twice as fast as parsing them one by one
    records = (
        together if isinstance(together, list) and len(together) == len(found) else [parse_json(text) for text in found]
    )
    return [event for event in map(usable, records) if event is not None]


def parse_json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def usable(record: Any) -> Event | StepRecord | None:
    """The event, or step record, in parsed JSON; None if a required field is missing or impossible."""
    if type(record) is not dict or type(record.get("time")) not in NUMBER or type(record.get("event")) is not str:
        return None
    if not -MOST <= record["time"] < MOST:  # also false for NaN
        return None
    if record["event"] == Stepped.kind:
        if "loss" in record and record["loss"] is None:
            record["loss"] = nan
        for name, kinds, default in NEEDED:
            value = record.get(name, default)
            if value is None and name in record and kinds is NUMBER:  # NaN and infinity are written as null
                value = record[name] = nan
            if type(value) not in kinds or (type(value) is int and not -MOST <= value < MOST):
                return None
        return record
    if any(type(value) is int and not -MOST <= value < MOST for value in record.values()):
        return None
    return event_of(record)


class Events:
    """Appends to a run's event file. If the disk is full, events are lost but the run continues."""

    def __init__(self, folder: Path) -> None:
        self.file = regular(
            folder / NAME, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        )  # no symbolic link is followed
        self.closed = weakref.finalize(self, os.close, self.file)  # also closed if the owner fails before closing it
        size = os.fstat(self.file).st_size
        self.torn = size > 0 and os.pread(self.file, 1, size - 1) != b"\n"  # a writer died in the middle of a line

    def add(self, event: Event) -> Event:
        """Write an event; returns it with the present time."""
        event = replace(event, time=time.time())
        line = b"\n" * self.torn + line_of(record_of(event)) + b"\n"
        try:
            self.torn = os.write(self.file, line) < len(line)
        except OSError:
            self.torn = True
        return event

    def close(self) -> None:
        self.closed()


def note(folder: Path, event: Event) -> None:
    """Append a single event, from a process that writes no others."""
    events = Events(folder)
    events.add(event)
    events.close()


def read(folder: Path) -> EventsRead:
    """All events of a run, up to the last complete line."""
    found = read_records(folder)
    made = (event_of(one) if isinstance(one, dict) else one for one in found.events)
    return EventsRead(
        [event for event in made if event is not None], found.offset, found.damaged, found.rest, found.wrong
    )


def read_records(folder: Path, offset: int = 0, most: int = -1) -> FoundRecords:
    """The events from a file position on, up to the last complete line, reading at most about `most` bytes."""
    try:
        with open(folder / NAME, "rb", opener=regular) as file:
            file.seek(offset)
            data = file.read(most)
            if data and most > 0 and b"\n" not in data:  # the line is longer than that
                data += file.readline(PIECE)
    except FileNotFoundError:
        return FoundRecords([], offset, 0, 0)
    except OSError as error:
        return FoundRecords([], offset, 0, 0, f"{NAME} can't be read: {error}")
    size = data.rfind(b"\n") + 1
    if not size and len(data) > PIECE:
        return FoundRecords([], offset, 0, len(data), f"{NAME} has a line longer than any of ours")
    lines = [line for line in data[:size].split(b"\n") if line]
    events = events_of(lines)
    return FoundRecords(events, offset + size, len(lines) - len(events), len(data) - size)
