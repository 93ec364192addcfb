"""The errors that users see: a mistake that they can correct, or a budget that can't be met."""

from __future__ import annotations

import errno


class Mistake(ValueError):
    """The user's input can't work; the text says what was found, why, and what to do."""


class JobFailed(Mistake):
    """The job's own code failed."""


class NotRepeatable(Mistake):
    """A block of the model can't be computed again from its input."""


class Crashed(RuntimeError):
    """A worker process ended without an answer, or with a fault of ours."""


class OverBudget(ValueError):
    """Nothing fits the budget; `nearest` is the plan that needs least."""

    def __init__(self, text: str, nearest: object = None) -> None:
        super().__init__(text)
        self.nearest = nearest


def first_line(error: BaseException) -> str:
    """The first line of what an error says; empty if its class, which may be the user's, fails to say it.

    >>> first_line(ValueError("no such thing\\nat all"))
    'no such thing'
    """
    try:
        return (str(error).strip().splitlines() or [""])[0][:200]
    except Exception:
        return ""


def error_sentence(error: BaseException) -> str:
    """The class of an error and what it says.

    >>> error_sentence(KeyError("width")), error_sentence(ValueError())
    ("KeyError: 'width'", 'ValueError')
    """
    said = first_line(error)
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def reason_text(error: BaseException) -> str:
    """Why something failed: a mistake in its own words, which name no class.

    >>> reason_text(Mistake("give a list")), reason_text(TypeError("no list"))
    ('give a list', 'TypeError: no list')
    """
    return first_line(error) if isinstance(error, Mistake) else error_sentence(error)


def says_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out. Torch has no class for that: its text is all there is to know it by."""
    words, said = (
        ("not enough memory", "can't allocate memory", "cannot allocate memory", "out of memory"),
        first_line(error).lower(),
    )
    return isinstance(error, MemoryError) or (
        isinstance(error, (RuntimeError, OSError)) and any(word in said for word in words)
    )


# Operating system errors -> what to do about them
CURES = {
    errno.EROFS: "nothing can be written there, give a folder on another file system",
    errno.EACCES: "give a folder that is yours, or ask for the right to this one",
    errno.EPERM: "give a folder that is yours, or ask for the right to this one",
    errno.ENOSPC: "free some space, or give a folder on another disk",
    errno.EDQUOT: "free some space, or give a folder on another disk",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


def system_text(error: OSError) -> str:
    """What the operating system refuses, where, and what to do.

    >>> system_text(OSError(errno.EROFS, "Read-only file system", "runs"))
    "'runs' can't be used (Read-only file system): nothing can be written there, give a folder on another file system"
    >>> system_text(OSError("something odd"))
    'something odd'
    """
    cure = f": {CURES[error.errno]}" if error.errno in CURES else ""
    where = (
        f"{error.filename!r} can't be used ({error.strerror})"
        if error.filename is not None
        else error.strerror or str(error)
    )
    return f"{where}{cure}"
