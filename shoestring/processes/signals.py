"""Stopping: a signal to the launcher is passed on to its workers, who save before they end."""
from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class Stoppable(Protocol):
    """A worker process, or a group of them."""

    def send_signal(self, sig: int) -> None: ...


@contextmanager
def stopping_gently(workers: Stoppable, asked: list[int], on_stop: Callable[[], None]) -> Iterator[None]:
    """While inside, a signal to stop is passed on and added to `asked`.

    The first lets the workers save, and `on_stop` is called; the second kills them. Only the main thread of a process can have signals:
    in another one, nothing is passed on.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        asked.append(number)
        if len(asked) == 1:
            on_stop()
        gentle = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM   # so that it knows who asked
        workers.send_signal(gentle if len(asked) == 1 else signal.SIGKILL)
        if len(asked) > 1:
            raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
