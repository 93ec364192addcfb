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


def says_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out. Torch has no class for that: its text is all there is to know it by."""
    words, said = (
        ("not enough memory", "can't allocate memory", "cannot allocate memory", "out of memory"),
        str(error).lower(),
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
