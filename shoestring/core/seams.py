"""Marks on those functions of ours that call what the user gave: core/blame.py finds them in the frames of an exception.

    @calls_user("loss")    what fails there in a library is the user's loss
    CALLS_USER = "data"    of a module: so are all of its functions
    @repeats_user          what the user gave is called again, and went well the first time: a failure is ours
    @changes_user          what the user gave is called in another way than he would call it: a failure is ours

A function is known by its code object, so it may be renamed, moved or replaced, and another room marks its own. Nothing
heavy is imported: the command line needs this before it needs anything else.
"""

from __future__ import annotations

from enum import Enum, auto

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import CodeType
    from typing import Any, TypeVar

    F = TypeVar("F", bound=Callable[..., Any])


class Seam(Enum):
    CALLS = auto()
    REPEATS = auto()
    CHANGES = auto()


class SeamMark:
    """What is known of a marked function. It keeps the code, so that no other gets its id."""

    def __init__(self, code: CodeType, seam: Seam, what: str = "") -> None:
        self.code, self.seam, self.what = code, seam, what  # `what` of the job it calls


MARKS: dict[int, SeamMark] = {}  # by the id of the code: code objects of two functions may be equal


def calls_user(what: str) -> Callable[[F], F]:
    """Marks a function that calls this of the job: its "model", "loss", "data"."""
    return lambda function: marked(function, Seam.CALLS, what)


def repeats_user(function: F) -> F:
    return marked(function, Seam.REPEATS)


def changes_user(function: F) -> F:
    return marked(function, Seam.CHANGES)


def marked(function: F, seam: Seam, what: str = "") -> F:
    code = function.__code__  # the mark stands below all other decorators
    MARKS[id(code)] = SeamMark(code, seam, what)
    return function


def seam_of(code: CodeType, module: Mapping[str, Any]) -> SeamMark | None:
    """The mark of a function's code, or that of its module, whose globals these are; None: it has none."""
    found = MARKS.get(id(code))
    if found is None and isinstance(what := module.get("CALLS_USER"), str):
        return SeamMark(code, Seam.CALLS, what)
    return found
