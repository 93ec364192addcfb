"""Errors on devices are reported by exception class and source line, never by message: a message may quote a record.

    reported       KeyError in job.py line 12        and how many devices failed in this way
    reported       its samples are no pairs          the message of a Mistake that our own code raised
    withheld       'Ada Lovelace, 36'                str(error) of anything else, and of the exceptions that caused it

This applies wherever a federation calls functions of the job: in rounds, plans and tasks, private or not, and to
--traceback, which shows lines of code without the message. To see a message, call the job's functions on records that
you are allowed to see.

A class or a file that was made while the job ran may be named after a record. So a class is named only if it stands in
its module under that name (else its nearest base that does), and a line only if its file is the one that was imported.

Contract: Of a device's failure its kind and place are told, never its text (tests/federated/devices/test_device_errors.py).
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from types import FrameType, TracebackType

from shoestring.core.errors import Mistake
from shoestring.core.user_code.blame import ROOT, Blame, blame_for

LONGEST = 60  # characters of an exception's class name
Failure = (Exception, SystemExit)  # what ends one device's work; `sys.exit` is a failure there as well


class UnusableRecords(Mistake):
    """A client's records can't be used. The reason is our own text, so it may be shown."""

    def __init__(self, name: str, why: str, cure: str) -> None:
        super().__init__(f"the client {name!r} can't be used, {why}: {cure}")
        self.why, self.cure = why, cure


class WithheldError(RuntimeError):
    """Replaces an exception whose message must not be shown; it has the traceback of the original, and its class's name
    as `kind`."""

    kind = ""


class UserInterrupt(KeyboardInterrupt):
    """The user's Ctrl-C while a device worked."""


@contextmanager
def exceptions_alone() -> Iterator[None]:
    """While inside, what a device raises that is no Exception, such as a KeyboardInterrupt of its own, becomes one without
    its text: only the user ends a run like this."""
    try:
        yield
    except (Exception, UserInterrupt):
        raise
    except BaseException as error:
        raise withhold_text(error) from None


def error_class(error: BaseException) -> str:
    """The name of an error's class, or of its nearest base that is in a module under its name.

    >>> error_class(KeyError()), error_class(type("Ada", (KeyError,), {})())
    ('KeyError', 'KeyError')
    """
    if isinstance(error, WithheldError) and error.kind:
        return error.kind
    return next(kind.__name__ for kind in type(error).__mro__ if stands_in_its_module(kind))[:LONGEST]


def stands_in_its_module(kind: type) -> bool:
    found: object = sys.modules.get(str(kind.__module__))
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is kind


def error_kind(error: BaseException) -> str:
    """What may be reported of an error: our own message, or else class and source line.

    >>> try:
    ...     exec(compile("{}['Ada Lovelace, 36']", "ada.csv", "exec"))
    ... except KeyError as error:
    ...     error_kind(error)
    'KeyError in an unknown place'
    """
    if isinstance(error, Mistake) and is_ours(error):
        return error.why if isinstance(error, UnusableRecords) else str(error)
    return f"{error_class(error)} in {place_of_failure(error).place}"


def place_of_failure(error: BaseException) -> Blame:
    """Where an error was raised, by the lines whose files were imported."""
    return blame_for(error, stands_in_its_file)


def stands_in_its_file(frame: FrameType) -> bool:
    """Whether a frame's code was compiled from its module's file; a notebook's module has none."""
    file = frame.f_globals.get("__file__")
    if not isinstance(file, str):
        return frame.f_globals.get("__name__") == "__main__"
    return os.path.abspath(frame.f_code.co_filename) == os.path.abspath(file)


def is_ours(error: BaseException) -> bool:
    """Whether our own code raised this error, so that its message is safe to show. An error raised while handling
    somebody else's is not safe: it may quote that one's message."""
    about = error.__cause__ or error.__context__
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    ours = bool(frames) and Path(frames[-1].f_code.co_filename).resolve().is_relative_to(ROOT)
    return ours and (about is None or isinstance(about, WithheldError) or is_ours(about))


def withhold_text(error: BaseException) -> WithheldError:
    """The error's traceback without its message, for `raise ... from`."""
    found = WithheldError(f"{error_class(error)}, whose text is withheld because it may hold a record")
    found.kind = error_class(error)
    return found.with_traceback(known_lines(error.__traceback__))


def known_lines(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback with the lines whose files were imported."""
    lines = []
    while traceback is not None:
        lines.append(traceback)
        traceback = traceback.tb_next
    found = None
    for one in reversed(lines):
        if stands_in_its_file(one.tb_frame):
            found = TracebackType(found, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return found


def count_kinds(kinds: Iterable[str]) -> str:
    """
    >>> count_kinds(["KeyError in job.py line 3", "it has no records", "KeyError in job.py line 3"])
    '2 x KeyError in job.py line 3, 1 x it has no records'
    """
    return ", ".join(f"{count} x {kind}" for kind, count in Counter(kinds).most_common())
