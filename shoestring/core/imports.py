"""Large imports without the collector of garbage: they make a million objects that all stay, and looking through those takes a quarter of
the time."""

from __future__ import annotations

import gc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType


class Uncollected:
    """While inside, no garbage is looked for."""

    def __enter__(self) -> None:
        self.before = gc.isenabled()
        gc.disable()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.before:
            gc.enable()


def leave_garbage() -> None:
    """For a process that is about to end: Python looks through every object once more then, which takes half a second after torch."""
    gc.freeze()
    gc.disable()
