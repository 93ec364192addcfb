"""What is told of a failure where devices' records are: its kind and its place, never its text.

    told           KeyError in job.py line 12        and how many devices failed like that
    told           its samples are no pairs          a Mistake that a line of ours raised, in its words
    withheld       'Ada Lovelace, 36'                what str(error) says may be a record, and so may what caused the error

It holds for all that a federation calls of a job, in rounds, plans and tasks, private or not, and for --traceback, which shows the lines
of code and not the text. To see a text, run the job's own functions on records that you may see.

Contract: Of a device's failure its kind and place are told, never its text (tests/federated/test_device_errors.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from traceback import walk_tb

from shoestring.core.blame import ROOT, blamed
from shoestring.core.errors import Mistake

LONGEST = 60  # of the name of a kind


class UnusableRecords(Mistake):
    """A client's records can't be used, for a reason in words of ours."""

    def __init__(self, name: str, why: str, cure: str) -> None:
        super().__init__(f"the client {name!r} can't be used, {why}: {cure}")
        self.why, self.cure = why, cure


class Withheld(RuntimeError):
    """Stands for an error of which only the kind may be told, with the lines where it happened."""


def class_of(error: BaseException) -> str:
    return type(error).__name__[:LONGEST]


def kind_of(error: BaseException) -> str:
    """
    >>> try:
    ...     {}["Ada Lovelace, 36"]
    ... except KeyError as error:
    ...     kind_of(error)
    'KeyError in <doctest shoestring.federated.device_errors.kind_of[0]> line 2'
    """
    if isinstance(error, UnusableRecords):
        return error.why
    return (
        str(error)
        if isinstance(error, Mistake) and raised_by_us(error)
        else f"{class_of(error)} in {blamed(error).place}"
    )


def raised_by_us(error: BaseException) -> bool:
    """Whether the line that raised it is ours, so that its text is, too; not where it tells of another error, whose text may be in it."""
    about = error.__cause__ or error.__context__
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    ours = bool(frames) and Path(frames[-1].f_code.co_filename).resolve().is_relative_to(ROOT)
    return ours and (about is None or isinstance(about, Withheld) or raised_by_us(about))


def withheld(error: BaseException) -> Withheld:
    """For `raise ... from`: the lines of an error without its text."""
    return Withheld(f"{class_of(error)}, whose text is withheld because it may hold a record").with_traceback(
        error.__traceback__
    )


def counted_kinds(kinds: Iterable[str]) -> str:
    """
    >>> counted_kinds(["KeyError in job.py line 3", "it has no records", "KeyError in job.py line 3"])
    '2 x KeyError in job.py line 3, 1 x it has no records'
    """
    return ", ".join(f"{count} x {kind}" for kind, count in Counter(kinds).most_common())
