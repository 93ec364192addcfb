"""Stop signals: the launcher passes them on to its workers, which save before they end."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from shoestring.core.running.signals import listening


class Stoppable(Protocol):
    """A worker process, or a group of them."""

    def send_signal(self, sig: int) -> None: ...


@contextmanager
def stopping_gently(workers: Stoppable, asked: list[int], on_stop: Callable[[], None]) -> Iterator[None]:
    """While inside, stop signals are passed on and added to `asked`.

    The first lets the workers save, and `on_stop` is called; the second kills them.
    """

    def stop(number: int, frame: Any) -> None:
        asked.append(number)
        if len(asked) > 1:
            workers.send_signal(signal.SIGKILL)
            raise KeyboardInterrupt
        workers.send_signal(number)  # the same signal, so that they can report which
        on_stop()  # report only afterwards: a short run may have ended before

    with listening(stop):
        yield
