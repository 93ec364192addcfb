"""Import large packages without garbage collection: they make a million objects that all stay, and scanning those takes
a quarter of the time."""

from __future__ import annotations

import gc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType


class WithoutGarbageCollection:
    """While inside, garbage collection is off."""

    def __enter__(self) -> None:
        self.before = gc.isenabled()
        gc.disable()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.before:
            gc.enable()


def leave_garbage() -> None:
    """For a process that is about to exit: skips Python's final collection, which takes half a second after torch."""
    gc.freeze()
    gc.disable()
