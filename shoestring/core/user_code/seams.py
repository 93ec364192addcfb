"""Marks for our functions that call the user's code; core/user_code/blame.py finds them in the stack frames of an exception.

    @calls_user("loss")    an error there, in a library, is the fault of the user's loss
    CALLS_USER = "data"    in a module: the same for all of its functions
    @repeats_user          the user's code is called a second time; it worked the first time, so an error is ours
    @changes_user          the user's code is called otherwise than the user would call it: an error is ours

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
    """A marked function. It holds the code object, so that its id is not given to another."""

    def __init__(self, code: CodeType, seam: Seam, what: str = "") -> None:
        self.code, self.seam, self.what = code, seam, what  # `what`: the part of the job that it calls


MARKS: dict[int, SeamMark] = {}  # by the id of the code object; two functions may have equal code objects


def calls_user(what: str) -> Callable[[F], F]:
    """Marks a function that calls this part of the job: "model", "loss", "data"."""
    return lambda function: mark_seam(function, Seam.CALLS, what)


def repeats_user(function: F) -> F:
    return mark_seam(function, Seam.REPEATS)


def changes_user(function: F) -> F:
    return mark_seam(function, Seam.CHANGES)


def mark_seam(function: F, seam: Seam, what: str = "") -> F:
    code = function.__code__  # so this decorator must stand below all others
    MARKS[id(code)] = SeamMark(code, seam, what)
    return function


def seam_of(code: CodeType, module: Mapping[str, Any]) -> SeamMark | None:
    """The mark of a function's code, or of its module (the one with these globals); None: unmarked."""
    found = MARKS.get(id(code))
    if found is None and isinstance(what := module.get("CALLS_USER"), str):
        return SeamMark(code, Seam.CALLS, what)
    return found
