"""One lifecycle for every run, whoever asks for it: a command or a script, in any room.

    opened folder (runs/resume) -> is it finished? its report        -> release
                                -> else the kept plan, or a new one
                                   execute, and note what ends it early
                                   report.json, report.html          -> release

A session knows nothing of what is executed: that is a callable, or the body of `noting_failure` where steps are handed out one by one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

from shoestring.core.codec import Unreadable
from shoestring.core.errors import Mistake
from shoestring.core.files import write_whole
from shoestring.runs.event import Adopted, Failed, Stopped
from shoestring.runs.events import NAME, note, read_records
from shoestring.runs.folder import CURES, Folder, Unusable
from shoestring.runs.report import Report, report_of
from shoestring.runs.request import Request
from shoestring.runs.resume import OpenedRun, came_to_nothing, forget_attempt, without_a_step

T = TypeVar("T")
REPORT, PAGE, PLAN = "report.json", "report.html", "plan.json"


@dataclass
class Session:
    """A run in a folder that this process holds until the session is left."""

    held: OpenedRun
    draw: Callable[[Report], str]  # the page of a report
    warn: Callable[[str], None] = warnings.warn
    by_script: bool = False  # it is told itself of what fails, so a run without a step is not kept for that
    offset: int = field(init=False)  # in the events: what comes after it was noted in this session

    def __post_init__(self) -> None:
        try:
            self.offset = (self.folder.path / NAME).stat().st_size
        except OSError:
            self.offset = 0

    @property
    def folder(self) -> Folder:
        return self.held.folder

    @property
    def request(self) -> Request:
        return self.held.request

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.held.lock.release()

    # Running

    def run(self, execute: Callable[[], T]) -> T:
        """What `execute` gives; what ends it early is noted."""
        with self.noting_failure():
            return execute()

    @contextmanager
    def noting_failure(self) -> Iterator[None]:
        """While inside, what ends the run early is noted among its events, unless whoever failed did so. A mistake before the first step
        leaves no run behind."""
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            with suppress(OSError):  # the error counts, not that it can't be noted
                self.note_failure(error)
            raise

    def note_failure(self, error: BaseException) -> None:
        path = self.folder.path
        said = read_records(path, self.offset).events
        if said and isinstance(said[-1], Stopped):
            return
        forgets = self.by_script and isinstance(error, Exception) and without_a_step(path)
        if forgets or came_to_nothing(error, path):
            forget_attempt(path)
            return
        if said and isinstance(said[-1], Failed):
            return
        if isinstance(error, KeyboardInterrupt):
            note(path, Stopped(text="stopped at once; what was not saved is lost"))
        else:
            note(path, Failed(str(error)))

    # Telling

    def finished(self) -> dict[str, Any] | None:
        """The report of the run if it is finished and is what is asked for; one that is damaged is made again."""
        return None if self.held.changed else kept_report(self.folder, self.warn)

    def finish(self, report: Mapping[str, Any]) -> None:
        """Keep what the run came to; the same command makes again what can't be written."""
        try:
            self.folder.write(REPORT, report)
        except OSError as error:
            self.warn(
                f"the run is done, but its report can't be written ({error.strerror}): free some space and give the same command"
            )

    def write_page(self) -> Report:
        """Draw what there is so far; gives the report that it shows. A page that can't be written leaves the run none the worse."""
        told = report_of(self.folder.path)
        try:
            write_whole(self.folder.path / PAGE, self.draw(told).encode())
        except OSError as error:
            self.warn(f"{self.folder.path / PAGE} can't be written: {error.strerror}")
        return told


def kept_report(folder: Folder, warn: Callable[[str], None]) -> dict[str, Any] | None:
    """The report of a finished run; none where there is no usable one."""
    try:
        return folder.read(REPORT) or None
    except Unusable as error:
        warn(str(error))
        return None


def kept_plan(
    folder: Folder, read: Callable[[Mapping[str, Any]], T], adopt: bool = False, name: str = PLAN
) -> T | None:
    """The plan that a run keeps; None if it has none. A damaged one is never run: with `adopt`, another is made."""
    try:
        found = folder.read(name)
        return read(found) if found else None
    except (Mistake, Unreadable, KeyError, TypeError, AttributeError) as error:
        if adopt:
            note(folder.path, Adopted(("a new plan, because the one it had was damaged",)))
            return None
        if isinstance(error, Unusable):
            raise
        if isinstance(error, Mistake):
            raise Unusable(f"{folder.path / name}: {error}; {CURES[name]}") from error
        raise folder.unusable(name, error) from error
