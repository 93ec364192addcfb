"""Runs as they are now: their folders are read as they grow, and drawn when there is news.

Nothing is read or drawn unless somebody looks. A run is looked at once a second and drawn at most every two, less often if
drawing it takes long, so that watching takes less than half a percent of one core from what is trained.
"""
from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple

from shoestring.page import content
from shoestring.page.overview import card, overview
from shoestring.page.top import title
from shoestring.page.words import state_of
from shoestring.runs.events import NAME, read
from shoestring.runs.folder import holder
from shoestring.runs.story import story
from shoestring.watch.places import check, is_run

LOOK, DRAW, SELDOM = 1.0, 2.0, 60.0   # seconds between looks, between drawings, and at most between drawings
QUIET = 30.0                          # seconds after which a run that goes on is drawn without news: it may hang
SHARE = 0.004                         # of one core that drawing a run may take
GOING_ON = ("planning", "training")


class View(NamedTuple):
    """Something to look at: what stands inside <main>, and a mark that changes with it."""

    title: str
    content: str
    mark: str


class Signs(NamedTuple):
    """What shows without reading that there is news of a run; `lock` also says when to ask who holds it."""

    events: tuple[int, int]               # inode, bytes
    files: tuple[int, ...]                # when run.json, plan.json and report.json were written
    lock: int                             # when somebody last took the lock
    holder: int | None


class Followed:
    """A run, and what was last drawn of it."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self.events: list[dict[str, Any]] = []
        self.offset = 0
        self.signs: Signs | None = None
        self.looked = self.due = self.drawn = float("-inf")   # when it was looked at, may be drawn again, was drawn
        self.view, self.card, self.state = View("", "", ""), "", ""

    def look(self, now: float) -> None:
        """Draw the run again if there is news, and it is time or the news is more than another step."""
        if now - self.looked < LOOK:
            return
        self.looked = now
        found = self.seen()
        if found == self.signs and (found.holder is None or now - self.drawn < QUIET):
            return
        only_events = self.signs is not None and found._replace(events=self.signs.events) == self.signs
        if only_events and now < self.due:
            return
        if self.signs is None or found.events[0] != self.signs.events[0] or found.events[1] < self.offset:
            self.events, self.offset = [], 0
        self.signs, self.drawn = found, now
        self.due = now + min(max(DRAW, self.draw() / SHARE), SELDOM)

    def seen(self) -> Signs:
        lock = changed(self.path / "lock")
        before = self.signs
        # Asking takes the lock for an instant if nobody has it, so a free one is asked about only after it was taken.
        free = before is not None and before.holder is None and before.lock == lock
        files = tuple(changed(self.path / name) for name in ("run.json", "plan.json", "report.json"))
        try:
            found = os.stat(self.path / NAME)
            size = (found.st_ino, found.st_size)
        except OSError:
            size = (0, 0)
        return Signs(size, files, lock, None if free else holder(self.path))

    def draw(self) -> float:
        """Draw what is known now; returns the seconds of computing that doing it again would take."""
        whole, before = self.offset == 0, time.thread_time()
        fresh, self.offset = read(self.path, self.offset)
        self.events += ({sys.intern(key): value for key, value in event.items()} for event in fresh)
        before = time.thread_time() if whole else before
        try:
            told = story(self.path, self.events)
            told["name"] = self.name
            html, small = content(told), card(told, self.name)
        except (ValueError, KeyError, TypeError, OSError) as error:
            told = {"name": self.name, "run": str(self.path), "text": f"This run can't be read: {error!s}"}
            html, small = content(told), card(told, self.name)
        self.view, self.card, self.state = View(title(told), html, mark(html)), small, state_of(told)
        if told.get("pid") is None:   # nothing is expected of it: what it takes in memory is only what was drawn
            self.events, self.offset = [], 0
        return time.thread_time() - before


class Watch:
    """All runs that are watched. Tabs share what is drawn."""

    def __init__(self, paths: Sequence[Path], clock: Callable[[], float] = time.monotonic) -> None:
        self.paths, self.clock, self.guard = list(paths), clock, RLock()
        self.runs: dict[str, Followed] = {}
        self.searched = float("-inf")
        for path in paths:
            check(path)
        self.search()

    def search(self) -> None:
        """Find runs that came or went in the folders given."""
        now = self.clock()
        if now - self.searched < LOOK:
            return
        self.searched = now
        known = {followed.path: followed for followed in self.runs.values()}
        runs: dict[str, Followed] = {}
        for path in dict.fromkeys(found for given in self.paths for found in runs_in(given)):
            followed = known.get(path) or Followed(unique(path.name or "run", {*runs, *self.runs}), path)
            runs[followed.name] = followed
        self.runs = runs

    def view(self, name: str | None = None) -> View | None:
        """A run as it is now, or all of them; None if there is no such run."""
        with self.guard:
            self.search()
            if name is None and len(self.runs) == 1:
                name = next(iter(self.runs))
            followed = [self.runs[name]] if name in self.runs else [] if name else list(self.runs.values())
            for one in followed:
                one.look(self.clock())
            if name is not None:
                return followed[0].view if followed else None
            followed.sort(key=lambda one: one.state not in GOING_ON)
            html = overview([one.card for one in followed], [one.state for one in followed])
            return View(f"{len(followed)} runs · shoestring", html, mark(html))


def runs_in(path: Path) -> Iterator[Path]:
    """The run a folder is, or the runs it holds, newest first."""
    path = path.resolve()
    if is_run(path):
        yield path
    elif path.is_dir():
        found = [one for one in path.iterdir() if is_run(one)]
        yield from sorted(found, key=lambda one: (-changed(one / "run.json"), one.name))


def unique(name: str, taken: set[str]) -> str:
    """A name nobody has.

    >>> unique("gpt", {"gpt", "gpt-2"})
    'gpt-3'
    """
    names = (name if place == 1 else f"{name}-{place}" for place in range(1, len(taken) + 2))
    return next(one for one in names if one not in taken)


def changed(path: Path) -> int:
    """When a file was last written, in nanoseconds; 0 if it is not there."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def mark(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:16]
