"""What a device's code prints, warns or logs is withheld, as the text of its errors is: it may hold a record.

A real device's output never reaches the developer either. While devices work, file descriptors 1 and 2 lead nowhere.
So C libraries, programs that the code starts, and streams and log handlers that it kept from before are silent, too.
Threads that were there before go on printing, by `print`, `warnings` and `logging`. The first line is replaced by a
note, once in a federation, whichever process it is in. What a C library keeps in a buffer until the process ends is not
seen here.

Contract: Nothing that runs on a device writes to our output (tests/federated/devices/test_device_errors.py).
"""

from __future__ import annotations

import io
import logging
import mmap
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import IO, Any, ClassVar, TextIO

from shoestring.core.running.signals import STOP, restore_handlers
from shoestring.federated.devices.device_errors import UserInterrupt, exceptions_alone

NOTE = (
    "what devices print, warn or log is withheld, because it may hold a record: call the job's functions yourself, on records "
    "that you may see"
)
NOTED = mmap.mmap(-1, 1)  # whether the note was written; shared with forked processes


class WithheldStream(io.TextIOBase):
    """A stream that drops what a device's code writes, and passes on the rest."""

    others: ClassVar[frozenset[int] | None] = None  # threads that go on printing; None: no device works now
    outside: ClassVar[dict[int, IO[str]]] = {}  # while a device works: where descriptors 1 and 2 led before

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.stream.encoding

    def fileno(self) -> int:
        return self.stream.fileno()

    def isatty(self) -> bool:
        return self.stream.isatty()

    def flush(self) -> None:
        self.stream.flush()

    def write(self, text: str) -> int:
        if self.others is None:
            return self.stream.write(text)
        if threading.get_ident() in self.others:
            return self.led_before().write(text)
        if text.strip() and not NOTED[0] and 2 in self.outside:
            NOTED[0] = 1
            self.outside[2].write(f"{NOTE}\n")
        return len(text)

    def led_before(self) -> IO[str]:
        """The stream to where this one led before descriptors were redirected."""
        try:
            return self.outside.get(self.stream.fileno(), self.stream)
        except (OSError, ValueError):  # a stream without a descriptor, such as a notebook's
            return self.stream


@contextmanager
def withheld_output() -> Iterator[None]:
    """While inside, what this thread prints, and threads that it starts, goes nowhere, and what it raises is an
    Exception, or the user's interrupt."""
    with ExitStack() as stack:
        if WithheldStream.others is None:
            for one in (user_interrupts(), redirected_descriptors(), replaced_streams()):
                stack.enter_context(one)
        stack.enter_context(exceptions_alone())
        yield


@contextmanager
def user_interrupts() -> Iterator[None]:
    """While inside, a KeyboardInterrupt that a signal's handler raises is a UserInterrupt."""
    handlers = {number: one for number in STOP if callable(one := signal.getsignal(number))}

    def handle(number: int, frame: FrameType | None) -> None:
        try:
            handlers[signal.Signals(number)](number, frame)
        except KeyboardInterrupt as error:
            raise UserInterrupt(*error.args) from None

    if threading.current_thread() is not threading.main_thread():  # which alone handles signals
        yield
        return
    with restore_handlers():
        for number in handlers:
            signal.signal(number, handle)
        yield


@contextmanager
def redirected_descriptors() -> Iterator[None]:
    """While inside, descriptors 1 and 2 lead nowhere; closed ones stay closed."""
    streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    flush_all(streams)
    with ExitStack() as stack, open(os.devnull, "wb") as nowhere:
        stack.callback(WithheldStream.outside.clear)
        for number, stream in ((1, sys.__stdout__), (2, sys.__stderr__)):
            with suppress(OSError):
                outside = os.fdopen(
                    os.dup(number),
                    "w",
                    buffering=1,
                    encoding=None if stream is None else stream.encoding,
                    errors="replace",
                )
                stack.enter_context(outside)
                os.dup2(nowhere.fileno(), number)
                stack.callback(os.dup2, outside.fileno(), number)
                WithheldStream.outside[number] = outside
        try:
            yield
        finally:
            flush_all(streams)


def flush_all(streams: tuple[TextIO | None, ...]) -> None:
    for one in streams:
        with suppress(OSError, ValueError):
            if one is not None:
                one.flush()


@contextmanager
def replaced_streams() -> Iterator[None]:
    """While inside, `sys.stdout`, `sys.stderr` and the handlers of all loggers that print are withheld streams."""
    before, here = (sys.stdout, sys.stderr), threading.get_ident()
    sys.stdout, sys.stderr = (one and WithheldStream(one) for one in before)
    handlers = [(one, one.setStream(WithheldStream(one.stream))) for one in printing_handlers()]
    WithheldStream.others = frozenset(one.ident for one in threading.enumerate() if one.ident) - {here}
    try:
        yield
    finally:
        WithheldStream.others = None
        for handler, stream in handlers:
            handler.setStream(stream)
        sys.stdout, sys.stderr = before


def printing_handlers() -> list[logging.StreamHandler[Any]]:
    """The handlers of all loggers that hold a stream."""
    loggers = (logging.getLogger(), *logging.root.manager.loggerDict.values())
    found = {one: None for logger in loggers if isinstance(logger, logging.Logger) for one in logger.handlers}
    return [
        one
        for one in found
        if isinstance(one, logging.StreamHandler)
        and not isinstance(one, logging.FileHandler)
        and vars(one).get("stream") is not None
    ]
