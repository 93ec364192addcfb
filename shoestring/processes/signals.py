"""Stopping: a signal to the launcher is passed on to its workers, who save before they end."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from shoestring.core.signals import listening


class Stoppable(Protocol):
    """A worker process, or a group of them."""

    def send_signal(self, sig: int) -> None: ...


@contextmanager
def stopping_gently(workers: Stoppable, asked: list[int], on_stop: Callable[[], None]) -> Iterator[None]:
    """While inside, a signal to stop is passed on and added to `asked`.

    The first lets the workers save, and `on_stop` is called; the second kills them.
    """

    def stop(number: int, frame: Any) -> None:
        asked.append(number)
        if len(asked) > 1:
            workers.send_signal(signal.SIGKILL)
            raise KeyboardInterrupt
        workers.send_signal(number)  # the very one, so that they can say who asked
        on_stop()  # and only now say that they were: a short run may have ended before

    with listening(stop):
        yield
