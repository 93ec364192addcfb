"""Signals that ask a process to stop: one rule for commands, their workers, servers and scripts.

A signal that is ignored stays ignored, because whoever started the process wants that: `nohup` ignores SIGHUP, and a shell ignores SIGINT
for what it starts in the background. Only the main thread of a process can handle signals: elsewhere, in a notebook's thread say, nothing
here has an effect.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # Ctrl-C, `kill`, and a terminal that closes

Handler = Callable[[int, FrameType | None], None]


def asked_by(number: int) -> str:
    """Why a process stops, for people.

    >>> asked_by(signal.SIGINT), asked_by(signal.SIGHUP)
    ('interrupted (Ctrl-C)', 'asked to by SIGHUP')
    """
    return "interrupted (Ctrl-C)" if number == signal.SIGINT else f"asked to by {signal.Signals(number).name}"


def is_ignored(number: int) -> bool:
    return signal.getsignal(number) is signal.SIG_IGN


def listen(handler: Handler) -> None:
    """Call `handler` for a signal to stop from now on."""
    if threading.current_thread() is threading.main_thread():
        for number in STOP:
            if signal.getsignal(number) not in (
                signal.SIG_IGN,
                None,
            ):  # None: of a C library, which could not be put back
                signal.signal(number, handler)


@contextmanager
def handlers_restored() -> Iterator[None]:
    """Whatever handles signals to stop inside, afterwards it is handled as before."""
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
    """While inside, a signal to stop calls `handler`."""
    with handlers_restored():
        listen(handler)
        yield


def deliver(number: int) -> None:
    """Do what a signal would have done, had it not been handled: call the process's own handler (Ctrl-C's raises KeyboardInterrupt), or
    end the process as a signal does, but by an exception, so that it can tidy up."""
    if not callable(signal.getsignal(number)):
        raise SystemExit(128 + number)
    signal.raise_signal(number)
