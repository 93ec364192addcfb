"""Errors on devices are reported by exception class and source line, never by message: a message may quote a record.

    reported       KeyError in job.py line 12        and how many devices failed in this way
    reported       its samples are no pairs          the message of a Mistake that our own code raised
    withheld       'Ada Lovelace, 36'                str(error) of anything else, and of the exceptions that caused it

This applies wherever a federation calls functions of the job: in rounds, plans and tasks, private or not, and to
--traceback, which shows lines of code without the message. To see a message, call the job's functions on records that
you are allowed to see.

Contract: Of a device's failure its kind and place are told, never its text (tests/federated/test_device_errors.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from traceback import walk_tb

from shoestring.core.blame import ROOT, blamed
from shoestring.core.errors import Mistake

LONGEST = 60  # characters of an exception's class name


class UnusableRecords(Mistake):
    """A client's records can't be used. The reason is our own text, so it may be shown."""

    def __init__(self, name: str, why: str, cure: str) -> None:
        super().__init__(f"the client {name!r} can't be used, {why}: {cure}")
        self.why, self.cure = why, cure


class WithheldError(RuntimeError):
    """Replaces an exception whose message must not be shown; it has the traceback of the original."""


def error_class(error: BaseException) -> str:
    return type(error).__name__[:LONGEST]


def error_kind(error: BaseException) -> str:
    """What may be reported of an error: our own message, or else class and source line.

    >>> try:
    ...     {}["Ada Lovelace, 36"]
    ... except KeyError as error:
    ...     error_kind(error)
    'KeyError in <doctest shoestring.federated.device_errors.error_kind[0]> line 2'
    """
    if isinstance(error, UnusableRecords):
        return error.why
    return (
        str(error)
        if isinstance(error, Mistake) and raised_by_us(error)
        else f"{error_class(error)} in {blamed(error).place}"
    )


def raised_by_us(error: BaseException) -> bool:
    """Whether our own code raised this error, so that its message is safe to show. An error raised while handling
    somebody else's is not safe: it may quote that one's message."""
    about = error.__cause__ or error.__context__
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    ours = bool(frames) and Path(frames[-1].f_code.co_filename).resolve().is_relative_to(ROOT)
    return ours and (about is None or isinstance(about, WithheldError) or raised_by_us(about))


def withhold_text(error: BaseException) -> WithheldError:
    """The error's traceback without its message, for `raise ... from`."""
    return WithheldError(f"{error_class(error)}, whose text is withheld because it may hold a record").with_traceback(
        error.__traceback__
    )


def count_kinds(kinds: Iterable[str]) -> str:
    """
    >>> count_kinds(["KeyError in job.py line 3", "it has no records", "KeyError in job.py line 3"])
    '2 x KeyError in job.py line 3, 1 x it has no records'
    """
    return ", ".join(f"{count} x {kind}" for kind, count in Counter(kinds).most_common())
