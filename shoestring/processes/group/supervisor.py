"""The crew: the workers of this machine as their launcher sees them, what has become of the group, and what follows from a death."""
from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoestring.core.errors import Mistake
from shoestring.core.units import seconds_text
from shoestring.processes.group.channel import CASUALTY, Ears
from shoestring.processes.group.rendezvous import Meeting
from shoestring.processes.launch import Crashed, OutOfMemory, fingerprint, memory_kills, reason
from shoestring.runs.events import note

TRIES = 3       # deaths in a row without a new step, after which it is given up
LOOK = 0.1      # seconds between two looks at the workers
JOIN = 60.0     # seconds in which the workers must have found each other
LEAVE = 10.0    # seconds in which a worker that is done must have ended
LAST = {"mistake": Mistake, "fault": Crashed, "out of memory": OutOfMemory}

class Stopped(Exception):
    """Asked to stop when there was nothing to save."""


@dataclass(frozen=True)
class Death:
    rank: int
    why: str           # SIGKILL, exit code 3, no sign of life for 30 s
    more: str = ""     # what that may mean
    ago: float = 0.0   # seconds

    def __str__(self) -> str:
        return f"worker {self.rank} died ({self.why})"


class Crew:
    """The workers of this machine as their launcher sees them, and what has become of the group."""

    def __init__(self, place: Path, task: dict[str, Any], on_event: Callable[[dict[str, Any]], None],
                 meeting: Meeting, patience: float, restarts: int) -> None:
        self.place, self.task, self.on_event, self.meeting = place, task, on_event, meeting
        self.patience, self.limit = patience, restarts
        self.folder = Path(task["folder"]) if "folder" in task else None
        self.ears = Ears(place / "socket")
        self.print = task.get("fingerprint") or fingerprint(task["file"])
        self.asked: list[int] = []        # signals to stop
        self.step = self.most = 0         # the last step that was done, and the last new one
        self.saved = 0                    # step of the last checkpoint
        self.restarts = self.vain = 0     # times formed again; deaths since the last new step
        self.recovery: list[float] = []   # seconds from a death to the next step
        self.lost_at = 0.0                # when that death was which the group has not recovered from yet
        self.paused_at = 0.0              # when it was asked to stop and let others in
        self.machines: list[int] = []     # that take part
        self.starts([], 0)

    def starts(self, ranks: list[int], world: int) -> None:
        """Workers are about to be started."""
        if self.machines:
            self.listen()   # to the last words of those before
        for node in (node for node in self.machines if node not in self.meeting.members):
            self.tell("warning", text=f"node {node} of {self.meeting.nodes.of} is gone: the others go on without it; it can come back "
                                      f"by the same command")
        self.world, self.machines = world, list(self.meeting.members)
        self.kills = memory_kills()
        self.beats = dict.fromkeys(ranks, time.monotonic())   # of each, the last
        self.joined: set[int] = set()                         # who is there; before, importing torch may keep it from beating
        self.done: dict[int, float] = {}            # who gave its result, and when
        self.words: list[dict[str, Any]] = []       # mistakes and faults, in the order they came
        self.result: dict[str, Any] = {}            # of worker 0
        self.contact = ""                           # how one worker lost another
        self.pid = 0                                # of worker 0, once it can be asked to stop
        self.mourned = self.told = False            # of deaths in this round; worker 0 was asked to stop
        own = {"file": self.source(), "fingerprint": self.print, "round": self.meeting.round, "join": JOIN,
               "deadline": max(10 * self.patience, JOIN), "device": self.meeting.nodes.device,
               "near": len(ranks) == world}
        (self.place / "task.json").write_text(json.dumps(self.task | own))

    def source(self) -> str:
        """The job file; the run's own copy, if somebody changed the file while the run went on."""
        given = str(self.task["file"])
        copy = self.folder / "job.py" if self.folder is not None else Path(given)
        changed = self.restarts and fingerprint(given) != self.print
        return str(copy) if changed and copy.is_file() and fingerprint(str(copy)) == self.print else given

    def send_signal(self, sig: int) -> None:
        """What `politely` does to a worker: ask the group to stop. Being killed is the agent's business."""
        if sig != signal.SIGTERM:
            return
        if not self.meeting.leads:
            self.meeting.tell({"event": "stop"})
        elif self.pid and not self.told:   # told twice, it would not save
            self.told = True
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
        else:
            self.meeting.leaving = not self.pid

    def listen(self) -> None:
        for event in self.ears.heard():
            rank, kind = event.pop("rank"), event["event"]
            self.beats[rank] = time.monotonic()
            if kind == "result":
                self.done[rank] = time.monotonic()
                self.result = event if rank == 0 else self.result
            elif kind == "lost":
                self.contact = self.contact or event["text"]
            elif kind in LAST:
                self.words.append(event)
            elif kind == "joined":
                self.joined.add(rank)
            elif kind != "beat" and rank == 0:
                self.follow(event)
        for news in self.meeting.news():
            if news["event"] == "stop":
                self.asked.append(signal.SIGTERM)
                self.send_signal(signal.SIGTERM)
            elif news["event"] == "died":
                self.mourn([Death(news["rank"], news["why"], news["more"], news["ago"])], news["round"])
            else:
                self.words.append(news)

    def follow(self, event: dict[str, Any]) -> None:
        """An event of worker 0."""
        kind = event["event"]
        if kind == "begun":
            self.pid, self.step = event["pid"], event["step"]
            self.most, self.saved = max(self.most, self.step), max(self.saved, self.step)
            if self.lost_at or self.paused_at:
                after = event["time"] - (self.lost_at or self.paused_at)
                self.paused_at = 0.0
                self.tell("re-formed", world=self.world, seconds=after, step=self.step,
                          text=f"{self.world} workers go on from {place(self.step)}, {seconds_text(after)} later")
            if self.asked:   # before it could listen
                self.send_signal(signal.SIGTERM)
        elif kind == "saved":
            self.saved = event["step"]
        elif kind == "step":
            self.step = event["step"]
            if self.lost_at:
                self.recovery.append(event["time"] - self.lost_at)
                self.lost_at = 0.0
            if self.step > self.most:
                self.most, self.vain = self.step, 0
        self.on_event(event)

    def tell(self, kind: str, **fields: Any) -> None:
        """An event of the group."""
        if self.folder is not None:
            note(self.folder, kind, **fields)
        self.on_event({"event": kind, "time": time.time()} | fields)

    def missing(self, codes: Mapping[int, int | None]) -> list[Death] | None:
        """Who died or is stuck, if there is no going on for the others; they may be on another machine.

        `codes` is how each worker here ended, None for those that live; what the dead had said is heard after that was found.
        """
        self.listen()
        now = time.monotonic()
        deaths = [Death(rank, *reason(code)) for rank, code in codes.items()
                  if code is not None and code != CASUALTY and (code or rank not in self.done)]
        silent = {rank: now - self.beats[rank] for rank, code in codes.items() if code is None}
        deaths += [Death(rank, f"no sign of life for {seconds_text(seconds)}", "it was suspended, or its machine is overloaded", seconds)
                   for rank, seconds in silent.items() if seconds > (self.patience if rank in self.joined else max(self.patience, JOIN))]
        lingering = self.finished(codes) and now - max(self.done.values()) > LEAVE and None in codes.values()
        return deaths if deaths or CASUALTY in codes.values() or self.words or lingering else None

    def finished(self, ranks: Collection[int]) -> bool:
        return bool(self.result) if 0 in ranks else set(ranks) <= set(self.done)

    def judge(self, deaths: list[Death]) -> None:
        """What follows from deaths, when no worker is left here. Raises what ends the group."""
        self.listen()
        until = time.monotonic() + 1.0
        while self.meeting.leads and self.meeting.nodes.of > 1 and time.monotonic() < until and not (deaths or self.words or self.mourned):
            time.sleep(LOOK)   # it was on another machine
            self.listen()
        if not self.meeting.leads:
            for word in self.words[:1]:
                self.meeting.tell(word)
            for death in deaths:
                self.meeting.tell({"event": "died", "round": self.meeting.round} | asdict(death))
            return
        for word in self.words[:1]:
            sys.stderr.write(word.get("trace", ""))
            raise LAST[word["event"]](word["text"])
        if self.asked:
            raise Stopped
        if any(death.why == "SIGKILL" for death in deaths) and memory_kills() > self.kills:
            raise OutOfMemory(f"the kernel killed worker {deaths[0].rank} of {self.world} when the machine ran out of memory")
        self.mourn(deaths, self.meeting.round)

    def mourn(self, deaths: list[Death], number: int) -> None:
        """Tell of deaths in a round and go on, unless there were too many."""
        counted = self.mourned or number < self.meeting.round
        if not counted:
            self.lost_at = self.lost_at or time.time() - max((death.ago for death in deaths), default=0.0)
            self.restarts += 1
            self.vain += 1
        last = self.vain >= TRIES or self.restarts > self.limit
        onward = "" if last else f": the others re-form and go on from {place(self.saved)}"
        for death in deaths:
            self.tell("died", rank=death.rank, why=death.why, step=self.step, text=f"{death} after {place(self.step)}{onward}")
        if not deaths and not counted:
            how = "one did not answer in time" if "timed out" in self.contact.lower() else "a connection broke"
            self.tell("warning", text=f"the workers lost each other after {place(self.step)} ({how}){onward}")
        self.mourned = self.mourned or not counted
        if last:
            raise Crashed(self.given_up(deaths))

    def given_up(self, deaths: list[Death]) -> str:
        who = str(deaths[0]) if deaths else "the workers lost each other"
        more = f"{deaths[0].more}; " if deaths and deaths[0].more else ""
        kept = f"the last checkpoint is of step {self.saved}" if self.saved else "there is no checkpoint yet"
        there = f" in {self.folder}" if self.folder and self.saved else ""
        if self.vain >= TRIES:
            return (f"{who}, and in {self.vain} tries no new step was done after {place(self.most)}: {more}{kept}{there}; "
                    f"the same command tries again from there")
        return (f"{who} after {place(self.step)}, and the {self.limit} restarts that --restarts allows are used up: {more}{kept}{there}; "
                f"the same command goes on from there")

    def make_room(self) -> None:
        """Let machines in that came late, or came back: save, and form another round with them."""
        if self.pid and not self.meeting.paused and self.meeting.newcomers:
            self.meeting.pause()
            self.paused_at = time.time()
            self.send_signal(signal.SIGTERM)

    def outcome(self) -> dict[str, Any]:
        if not self.result:
            raise Crashed("the workers ended without a result")
        return self.result | self.figures()

    def stopped(self) -> dict[str, Any]:
        if self.folder is not None and self.saved:
            note(self.folder, "stopped", step=self.saved, text=f"stopped; the last checkpoint is of step {self.saved}")
        return {"event": "result", "stopped": self.saved} | self.figures()

    def figures(self) -> dict[str, Any]:
        return {"world": self.world, "restarts": self.restarts, "recovery_seconds": self.recovery}


def place(step: int) -> str:
    return f"step {step}" if step else "the beginning"
