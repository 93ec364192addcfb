"""What a run's events come to, kept while they are read on: a page of a long run is drawn again without reading it all again.

Of a step only its figures are kept, in columns: a million of them take 80 MB, as dicts they take more than a GB.
"""
from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import Any

from shoestring.runs.events import PIECE, read

ENDS = {"finished": "finished", "stopped": "stopped", "failed": "failed"}
STANDS = (*ENDS, "begun", "planning")   # kinds that say what a run is doing
MISSING = -1                            # in place of bytes that a step does not tell of


class Steps:
    """The steps that count, in order: what was done again after a resume stands in place of what was lost."""

    def __init__(self) -> None:
        self.number, self.process, self.most, self.moved, self.sent = (array("q") for _ in range(5))
        self.time, self.loss, self.seconds = (array("d") for _ in range(3))
        self.age, self.plan = array("q"), array("q")   # the how manieth since it began or went on; adoptions before it

    @property
    def columns(self) -> tuple[Any, ...]:
        return (self.number, self.process, self.most, self.moved, self.sent, self.time, self.loss, self.seconds, self.age, self.plan)

    def __len__(self) -> int:
        return len(self.number)

    def add(self, event: dict[str, Any], age: int, plan: int) -> None:
        number = event["step"]
        if self.number and number <= self.number[-1]:   # done again, and the word that it went back is lost
            place = bisect_left(self.number, number)
            end, again = place + (self.number[place] == number), Steps()
            again.add(event, age, plan)
            for column, value in zip(self.columns, again.columns, strict=True):
                column[place:end] = value
            return
        self.number.append(number)
        self.process.append(event["process"])
        self.most.append(event["most"])
        self.moved.append(event.get("moved", MISSING))
        self.sent.append(event.get("sent", MISSING))
        self.time.append(event["time"])
        self.loss.append(event["loss"])
        self.seconds.append(event["seconds"])
        self.age.append(age)
        self.plan.append(plan)

    def back_to(self, step: int) -> None:
        """Forget what comes after a step."""
        place = bisect_right(self.number, step)
        for column in self.columns:
            del column[place:]


class Fold:
    """Events, read on from where reading ended."""

    def __init__(self) -> None:
        self.offset = 0                              # in the file
        self.damaged = self.rest = 0                 # lines that were skipped; bytes after the last whole line
        self.wrong = ""                              # why it can't be read on
        self.steps = Steps()
        self.others: list[dict[str, Any]] = []       # all that are not steps or measurements
        self.saved: list[dict[str, Any]] = []
        self.measured: list[tuple[int, dict[str, Any]]] = []   # with the adoptions before it
        self.stand: dict[str, Any] = {"event": "planning"}     # what it was doing last
        self.wanted = 0                              # steps
        self.begun: float | None = None              # when the first event was, and the last
        self.last: float | None = None
        self.age = self.plan = 0

    def read(self, folder: Path) -> Fold:
        """Take in what is new in the file."""
        while True:
            found = read(folder, self.offset, PIECE)
            for event in found.events:
                self.add(event)
            self.damaged += found.damaged
            before, self.offset, self.rest, self.wrong = self.offset, found.offset, found.rest, found.wrong
            if self.offset == before:
                return self

    def add(self, event: dict[str, Any]) -> None:
        kind, self.last = event["event"], event["time"]
        if self.begun is None:
            self.begun = self.last
        if kind == "step":
            self.age += 1
            self.steps.add(event, self.age, self.plan)
            return
        if kind == "measured":
            self.measured.append((self.plan, event))
            return
        self.others.append(event)
        if kind in STANDS:
            self.stand = event
        if kind == "begun":
            self.wanted, self.age = event["steps"], 0
            self.steps.back_to(event["step"])
        elif kind == "adopted":
            self.plan, self.age = self.plan + 1, 0
        elif kind == "saved":
            self.saved.append(event)
