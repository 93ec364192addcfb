"""Runs as they are now: their folders are read as they grow, and drawn when there is news.

Nothing is read or drawn unless somebody looks. A run is looked at once a second and drawn at most every two, less often if
drawing it takes long, so that watching takes less than half a percent of one core from what is trained.

Reading may take long (a million events) or for ever (a disk that is gone), so nobody who asks for a page does it: a thread does, and what
was last drawn is shown if it is not done soon. Every run has a lock of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from threading import Lock, Thread
from typing import NamedTuple

from markupsafe import Markup

from shoestring.runs.events import NAME
from shoestring.runs.folder import holder
from shoestring.runs.history import History
from shoestring.runs.report import Report, report_of
from shoestring.show.page import content, prepare
from shoestring.show.page.overview import curves, overview, summary
from shoestring.show.page.top import title
from shoestring.show.page.words import state_of
from shoestring.show.watch.places import check, is_run

LOOK, DRAW, SELDOM = 1.0, 2.0, 60.0  # seconds between looks, between drawings, and at most between drawings
QUIET = 30.0  # seconds after which a run that goes on is drawn without news: it may hang
SHARE = 0.004  # of one core that drawing a run may take
PATIENCE = 5.0  # seconds that a request waits for what is read


class View(NamedTuple):
    """Something to look at: what stands inside <main>, and a mark that changes with it."""

    title: str
    content: Markup
    mark: str


class Signs(NamedTuple):
    """What shows without reading that there is news of a run; `lock` also says when to ask who holds it."""

    events: tuple[int, int]  # inode, bytes
    files: tuple[int, ...]  # when run.json, plan.json and report.json were written
    lock: int  # when somebody last took the lock
    holder: int | None


class FollowedRun:
    """A run, and what was last drawn of it."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self.fold = History()
        self.signs: Signs | None = None
        self.looked = self.due = self.drawn = float("-inf")  # when it was looked at, may be drawn again, was drawn
        self.turn = Lock()  # of who looks
        self.state = ""
        self.show(Report(path, text="This run is being read …"))

    def look(self, now: float) -> None:
        """Draw the run again if there is news, and it is time or the news is more than another step; one at a time does."""
        never = self.drawn == float("-inf")
        if not self.turn.acquire(timeout=PATIENCE if never else 0):
            return
        try:
            self.look_now(now)
        finally:
            self.turn.release()

    def look_now(self, now: float) -> None:
        if now - self.looked < LOOK:
            return
        self.looked = now
        found = self.seen()
        if found == self.signs and (found.holder is None or now - self.drawn < QUIET):
            return
        only_events = self.signs is not None and found._replace(events=self.signs.events) == self.signs
        if only_events and now < self.due:
            return
        if self.signs is None or found.events[0] != self.signs.events[0] or found.events[1] < self.fold.offset:
            self.fold = History()
        seconds = self.draw()
        self.signs, self.drawn = found, now
        self.due = now + min(max(DRAW, seconds / SHARE), SELDOM)

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
        whole, before = self.fold.offset == 0, time.thread_time()
        self.fold.read(self.path)
        before = time.thread_time() if whole else before
        try:
            told = report_of(self.path, self.fold)
            self.show(told)
        except Exception as error:  # whatever is wrong with this run, the others go on
            told = Report(self.path, text=f"This run can't be read: {error!s}")
            self.show(told)
        if told.pid is None:  # nothing is expected of it: what it takes in memory is only what was drawn
            self.fold = History()
        return time.thread_time() - before

    def show(self, told: Report) -> None:
        html = content(told)
        self.summary, self.state, self.curves = summary(told, self.name), state_of(told), curves(told)
        self.view = View(title(told), html, mark(html))


class Watch:
    """All runs that are watched. Tabs share what is drawn."""

    def __init__(self, paths: Sequence[Path], clock: Callable[[], float] = time.monotonic) -> None:
        self.paths, self.clock, self.turn = list(paths), clock, Lock()
        self.runs: dict[str, FollowedRun] = {}
        self.searched = float("-inf")
        for path in paths:
            check(path)
        prepare()  # its cost must not count as that of drawing a run, which says how often it is drawn
        self.search()

    def search(self) -> None:
        """Find runs that came or went in the folders given; one at a time does."""
        if not self.turn.acquire(blocking=False):
            return
        try:
            now = self.clock()
            if now - self.searched >= LOOK:
                self.searched = now
                self.runs = self.found()
        finally:
            self.turn.release()

    def found(self) -> dict[str, FollowedRun]:
        known = {followed.path: followed for followed in self.runs.values()}
        runs: dict[str, FollowedRun] = {}
        for path in dict.fromkeys(found for given in self.paths for found in runs_in(given)):
            followed = known.get(path) or FollowedRun(unique(name_of(path), {*runs, *self.runs}), path)
            runs[followed.name] = followed
        return runs

    def view(self, name: str | None = None) -> View | None:
        """A run as it is now, or all of them; None if there is no such run."""
        looking = Thread(target=self.look, args=(name,), daemon=True)
        looking.start()
        looking.join(PATIENCE)
        followed = self.asked_for(name)
        if name is not None or len(followed) == 1:
            return followed[0].view if followed else None
        html = overview([one.summary for one in followed])
        return View(f"{len(followed)} runs · shoestring", html, mark(html))

    def curves(self, name: str) -> str | None:
        """The lines of a run as they were last drawn, as JSON; None if there is no such run."""
        followed = self.asked_for(name)
        return followed[0].curves if followed else None

    def look(self, name: str | None) -> None:
        """Read and draw what is asked for; last what another thread is reading now."""
        self.search()
        for one in sorted(self.asked_for(name), key=lambda one: one.turn.locked()):
            one.look(self.clock())

    def asked_for(self, name: str | None) -> list[FollowedRun]:
        runs = self.runs
        return list(runs.values()) if name is None else [runs[name]] if name in runs else []


def runs_in(path: Path) -> Iterator[Path]:
    """The run a folder is, or the runs it holds, newest first."""
    path = path.resolve()
    if is_run(path):
        yield path
        return
    try:
        found = [one for one in path.iterdir() if is_run(one)]
    except OSError:  # it is gone, or may not be read any more
        return
    yield from sorted(found, key=lambda one: (-changed(one / "run.json"), one.name))


def name_of(path: Path) -> str:
    """What to call a run: its folder's name, as text that can be sent."""
    return os.fsencode(path.name or "run").decode(errors="replace")


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
