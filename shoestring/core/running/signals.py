"""Signals that ask a process to stop: one rule for commands, their workers, servers and scripts.

A signal that is ignored stays ignored, because whoever started the process wants that: `nohup` ignores SIGHUP, and a
shell ignores SIGINT for background processes. Only a process's main thread can handle signals: in other threads, such
as a notebook's, nothing here has an effect.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # Ctrl-C, `kill`, and a terminal that closes

Handler = Callable[[int, FrameType | None], None]


def stop_reason(number: int) -> str:
    """Why a process stops, in words.

    >>> stop_reason(signal.SIGINT), stop_reason(signal.SIGHUP)
    ('interrupted (Ctrl-C)', 'asked to by SIGHUP')
    """
    return "interrupted (Ctrl-C)" if number == signal.SIGINT else f"asked to by {signal.Signals(number).name}"


def is_ignored(number: int) -> bool:
    return signal.getsignal(number) is signal.SIG_IGN


def listen(handler: Handler) -> None:
    """Call `handler` for stop signals from now on."""
    if threading.current_thread() is threading.main_thread():
        for number in STOP:
            if signal.getsignal(number) not in (
                signal.SIG_IGN,
                None,
            ):  # None: set by a C library, and could not be restored
                signal.signal(number, handler)


@contextmanager
def restore_handlers() -> Iterator[None]:
    """Restores the handlers of stop signals afterwards."""
    before = {number: signal.getsignal(number) for number in STOP}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                if handler is not None:
                    signal.signal(number, handler)


@contextmanager
def listening(handler: Handler) -> Iterator[None]:
    """While inside, a stop signal calls `handler`."""
    with restore_handlers():
        listen(handler)
        yield


def deliver(number: int) -> None:
    """Do what a signal would have done unhandled: call the process's own handler (Ctrl-C's raises KeyboardInterrupt),
    or end the process as the signal would, but by an exception, so that cleanup runs."""
    if not callable(signal.getsignal(number)):
        raise SystemExit(128 + number)
    signal.raise_signal(number)
