"""Runs as they are now: their folders are read as they grow, and redrawn when there is news.

Nothing is read or drawn while nobody is looking. A run is checked once a second and redrawn at most every two seconds,
less often if drawing takes long, so that watching takes less than half a percent of a core from the training.

Reading may take long (a million events) or forever (a disk that is gone), so requests do not read: a thread does, and
the last drawing is shown if it does not finish soon. Every run has its own lock.
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

from shoestring.runs.events.event_log import NAME
from shoestring.runs.events.history import History
from shoestring.runs.folder import holder
from shoestring.runs.reports.report import Report, report_of
from shoestring.show.page import content, prepare
from shoestring.show.page.overview import curves, overview, summary
from shoestring.show.page.sections.top import title
from shoestring.show.page.words import state_of
from shoestring.show.watch.places import check, is_run

LOOK, DRAW, SELDOM = 1.0, 2.0, 60.0  # seconds between checks, between drawings, and at most between drawings
QUIET = 30.0  # seconds without news after which a running run is redrawn anyway: it may hang
SHARE = 0.004  # largest fraction of a core for drawing one run
PATIENCE = 5.0  # seconds that a request waits for reading


class View(NamedTuple):
    """The inside of <main>, and a mark that changes with it."""

    title: str
    content: Markup
    mark: str


class Signs(NamedTuple):
    """Signs of news that can be seen without reading; `lock` tells when to ask who holds the lock."""

    events: tuple[int, int]  # inode, bytes
    files: tuple[int, ...]  # modification times of run.json, plan.json and report.json
    lock: int  # when somebody last took the lock
    holder: int | None


class FollowedRun:
    """A run, and its last drawing."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self.fold = History()
        self.signs: Signs | None = None
        self.looked = self.due = self.drawn = float("-inf")  # when it was last checked, may be redrawn, was last drawn
        self.turn = Lock()  # held by the thread that checks
        self.state = ""
        self.show(Report(path, text="This run is being read …"))

    def look(self, now: float) -> None:
        """Redraw the run if there is news and it is time, or if the news is more than another step; one thread at a
        time."""
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
        found = self.read_signs()
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

    def read_signs(self) -> Signs:
        lock = modified_at(self.path / "lock")
        before = self.signs
        # Asking takes a free lock for an instant, so a free lock is only asked about after somebody took it.
        free = before is not None and before.holder is None and before.lock == lock
        files = tuple(modified_at(self.path / name) for name in ("run.json", "plan.json", "report.json"))
        try:
            found = os.stat(self.path / NAME)
            size = (found.st_ino, found.st_size)
        except OSError:
            size = (0, 0)
        return Signs(size, files, lock, None if free else holder(self.path))

    def draw(self) -> float:
        """Draw the present state; returns the seconds of CPU time that another drawing would take."""
        whole, before = self.fold.offset == 0, time.thread_time()
        self.fold.read(self.path)
        before = time.thread_time() if whole else before
        try:
            told = report_of(self.path, self.fold)
            self.show(told)
        except Exception as error:  # whatever is wrong with this run, the others go on
            told = Report(self.path, text=f"This run can't be read: {error!s}")
            self.show(told)
        if told.pid is None:  # it has ended: keep only what was drawn in memory
            self.fold = History()
        return time.thread_time() - before

    def show(self, told: Report) -> None:
        html = content(told)
        self.summary, self.state, self.curves = summary(told, self.name), state_of(told), curves(told)
        self.view = View(title(told), html, mark(html))


class Watch:
    """All watched runs. Browser tabs share the drawings."""

    def __init__(self, paths: Sequence[Path], clock: Callable[[], float] = time.monotonic) -> None:
        self.paths, self.clock, self.turn = list(paths), clock, Lock()
        self.runs: dict[str, FollowedRun] = {}
        self.searched = float("-inf")
        for path in paths:
            check(path)
        prepare()  # its cost must not count as that of drawing a run, which limits how often it is drawn
        self.search()

    def search(self) -> None:
        """Find runs that appeared or disappeared in the given folders; one thread at a time."""
        if not self.turn.acquire(blocking=False):
            return
        try:
            now = self.clock()
            if now - self.searched >= LOOK:
                self.searched = now
                self.runs = self.find_runs()
        finally:
            self.turn.release()

    def find_runs(self) -> dict[str, FollowedRun]:
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
        followed = self.requested_runs(name)
        if name is not None or len(followed) == 1:
            return followed[0].view if followed else None
        html = overview([one.summary for one in followed])
        return View(f"{len(followed)} runs · shoestring", html, mark(html))

    def curves(self, name: str) -> str | None:
        """The lines of a run as last drawn, as JSON; None if there is no such run."""
        followed = self.requested_runs(name)
        return followed[0].curves if followed else None

    def look(self, name: str | None) -> None:
        """Read and draw what is requested; last the run that another thread is reading now."""
        self.search()
        for one in sorted(self.requested_runs(name), key=lambda one: one.turn.locked()):
            one.look(self.clock())

    def requested_runs(self, name: str | None) -> list[FollowedRun]:
        runs = self.runs
        return list(runs.values()) if name is None else [runs[name]] if name in runs else []


def runs_in(path: Path) -> Iterator[Path]:
    """The run in a folder, or the runs in its subfolders, newest first."""
    path = path.resolve()
    if is_run(path):
        yield path
        return
    try:
        found = [one for one in path.iterdir() if is_run(one)]
    except OSError:  # gone, or unreadable
        return
    yield from sorted(found, key=lambda one: (-modified_at(one / "run.json"), one.name))


def name_of(path: Path) -> str:
    """A run's name: its folder's name, as valid text."""
    return os.fsencode(path.name or "run").decode(errors="replace")


def unique(name: str, taken: set[str]) -> str:
    """A name that is not taken.

    >>> unique("gpt", {"gpt", "gpt-2"})
    'gpt-3'
    """
    names = (name if place == 1 else f"{name}-{place}" for place in range(1, len(taken) + 2))
    return next(one for one in names if one not in taken)


def modified_at(path: Path) -> int:
    """Modification time of a file in nanoseconds; 0 if it does not exist."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def mark(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:16]
