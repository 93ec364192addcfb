"""Stopping: a signal to the launcher is passed on to its workers, who save before they end."""
from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class Stoppable(Protocol):
    """A worker process, or a group of them."""

    def send_signal(self, sig: int) -> None: ...


@contextmanager
def stopping_gently(workers: Stoppable, asked: list[int]) -> Iterator[None]:
    """While inside, a signal to stop is passed on and added to `asked`: the first lets the workers save, the second kills them."""

    def stop(number: int, frame: Any) -> None:
        asked.append(number)
        if len(asked) == 1:
            print("\nstopping after this step, with a checkpoint; once more to stop at once", file=sys.stderr)
        workers.send_signal(signal.SIGTERM if len(asked) == 1 else signal.SIGKILL)
        if len(asked) > 1:
            raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
