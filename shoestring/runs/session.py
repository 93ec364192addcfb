"""The lifecycle of every run, from a command or a script, in any room.

    open the folder (runs/resume) -> finished: its report                            -> release
                                  -> else take the kept plan, or make and keep one
                                     execute; note what ends it early
                                     write report.json and report.html               -> release

A room supplies an `Execution`, and `Session.play` drives it. If a script takes steps one by one, its `RoomRun` drives
the same parts: `settle`, the steps inside `noting_failure`, `end`.

Contract: a room's run writes neither plan.json nor report.json, and keeps nothing that a restart needs outside of the
folder (tests/runs/test_session.py).
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from shoestring.core.errors import Mistake
from shoestring.core.files.codec import Unreadable
from shoestring.core.files.files import write_whole
from shoestring.planning.plan import Outcome, Plan
from shoestring.runs.events.event import Adopted, Failed, Stopped, Warned
from shoestring.runs.events.event_log import NAME, note, read_records
from shoestring.runs.folder import CURES, Folder, Unusable
from shoestring.runs.reports.report import Report, report_of
from shoestring.runs.request import Request
from shoestring.runs.resume import OpenedRun, came_to_nothing, forget_attempt, without_a_step

T = TypeVar("T")
P = TypeVar("P", bound=Plan[Any, Any])
E = TypeVar("E", bound="Ended")
REPORT, PAGE, PLAN = "report.json", "report.html", "plan.json"


class Ended(Protocol):
    """How an execution ended."""

    @property
    def unfinished(self) -> bool:
        """Whether it was asked to stop, or could not save its result: the same command continues it."""


class RoomRun(ABC, Generic[P, E]):
    """What a room supplies to a session: how to plan, and what to report."""

    keeps_plan: ClassVar[bool] = True  # False: a resumed run plans again and arrives at the same plan
    adopt: bool = False  # plan again if the kept plan is damaged

    def begin(self) -> None:
        """Called before the plan is read or made."""

    @abstractmethod
    def read_plan(self, file: Mapping[str, Any]) -> P:
        """The plan in a file. Raises Unreadable or Mistake if there is none."""

    def accept(self, kept: P) -> P | None:
        """The plan to continue with; None: the kept one is unusable now, choose another. Raises Mistake to refuse."""
        return kept

    @abstractmethod
    def choose(self) -> Outcome[P]:
        """Make a new plan. Raises OverBudget if nothing fits."""

    def note_plan(self, outcome: Outcome[P]) -> None:
        """Called once the new plan is stored: a run that is killed after this resumes with it."""

    @abstractmethod
    def report(self, plan: P, ended: E) -> Mapping[str, Any]:
        """The result of the run, for report.json and --json."""


class Execution(RoomRun[P, E]):
    """A run that is executed in one call."""

    @abstractmethod
    def execute(self, plan: P) -> E:
        """Execute the plan, and write events to the folder."""


@dataclass(frozen=True)
class Played(Generic[E]):
    """The result of `Session.play`."""

    report: Mapping[str, Any] | None  # None: unfinished
    ended: E | None = None  # None: it had finished before


@dataclass
class Session:
    """A run in a folder that this process holds until the session is left."""

    held: OpenedRun
    draw: Callable[[Report], str]  # draws a report as a page
    warn: Callable[[str], None] = warnings.warn
    by_script: bool = False  # a script sees errors itself, so a run without a step is not kept on their account
    offset: int = field(init=False)  # position in the events: later ones were written in this session

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

    def play(self, execution: Execution[P, E], anew: bool = False) -> Played[E]:
        """Execute the run's plan, unless the run is finished (`anew`: even then)."""
        if not anew and (known := self.stored_report()) is not None:
            self.write_page()
            return Played(known)
        with self.noting_failure():
            plan = self.settle(execution)
            ended = execution.execute(plan)
            return Played(self.end(execution, plan, ended), ended)

    def settle(self, run: RoomRun[P, Any]) -> P:
        """The run's plan: the stored one, or a new one, which is stored."""
        run.begin()
        goes_on = run.keeps_plan and not self.held.changed
        kept = kept_plan(self.folder, run.read_plan, run.adopt) if goes_on else None
        if kept is not None and (accepted := run.accept(kept)) is not None:
            return accepted
        outcome = run.choose()
        self.folder.write(PLAN, outcome.as_json())
        for warning in outcome.chosen.warnings:
            note(self.folder.path, Warned(warning))
        run.note_plan(outcome)
        return outcome.chosen

    def end(self, run: RoomRun[P, E], plan: P, ended: E) -> Mapping[str, Any] | None:
        """Store the report of a finished run; None if it is unfinished. Its page is drawn in both cases."""
        report = None if ended.unfinished else run.report(plan, ended)
        if report is not None:
            self.finish(report)
        self.write_page()
        return report

    @contextmanager
    def noting_failure(self) -> Iterator[None]:
        """While inside, an error that ends the run early is written to its events, unless that was done already. A
        mistake before the first step leaves no run behind."""
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            with suppress(OSError):  # report the error itself, not that it can't be written
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

    def stored_report(self) -> dict[str, Any] | None:
        """The report of the run if it is finished and matches the request; a damaged one is made again."""
        return None if self.held.changed else kept_report(self.folder, self.warn)

    def finish(self, report: Mapping[str, Any]) -> None:
        """Store the result; if it can't be written, the same command makes it again."""
        try:
            self.folder.write(REPORT, report)
        except OSError as error:
            self.warn(
                f"the run is done, but its report can't be written ({error.strerror}): free some space and give the same command"
            )

    def write_page(self) -> Report:
        """Draw the page of what there is so far, and return the report it shows. A failure to write does not affect the
        run."""
        told = report_of(self.folder.path)
        try:
            write_whole(self.folder.path / PAGE, self.draw(told).encode())
        except OSError as error:
            self.warn(f"{self.folder.path / PAGE} can't be written: {error.strerror}")
        return told


def kept_report(folder: Folder, warn: Callable[[str], None]) -> dict[str, Any] | None:
    """The report of a finished run; None if it is missing or unusable."""
    try:
        return folder.read(REPORT) or None
    except Unusable as error:
        warn(str(error))
        return None


def kept_plan(
    folder: Folder, read: Callable[[Mapping[str, Any]], T], adopt: bool = False, name: str = PLAN
) -> T | None:
    """The stored plan of a run; None if there is none. A damaged one is refused, or with `adopt` replaced by a new
    plan."""
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
