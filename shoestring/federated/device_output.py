"""What a device's code prints, warns or logs is withheld, as the text of its errors is: it may hold a record.

A real device's output never reaches the developer either. The first line is replaced by a note, once in a federation,
whichever process it is in. Threads that were there before go on printing. What a C library writes to the file
descriptor itself is not seen here.

Contract: Nothing that runs on a device writes to our output (tests/federated/test_device_errors.py).
"""

from __future__ import annotations

import io
import logging
import mmap
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, TextIO

NOTE = (
    "what devices print, warn or log is withheld, because it may hold a record: call the job's functions yourself, on records "
    "that you may see"
)
NOTED = mmap.mmap(-1, 1)  # whether the note was written; shared with forked processes


class WithheldStream(io.TextIOBase):
    """A stream that drops what a device's code writes, and passes on the rest."""

    others: ClassVar[frozenset[int] | None] = None  # threads that go on printing; None: no device works now

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
        if self.others is None or threading.get_ident() in self.others:
            return self.stream.write(text)
        if text.strip() and not NOTED[0]:
            NOTED[0] = 1
            if sys.__stderr__ is not None:
                sys.__stderr__.write(f"{NOTE}\n")
        return len(text)


@contextmanager
def withheld_output() -> Iterator[None]:
    """While inside, what this thread prints, and threads that it starts, goes nowhere."""
    if WithheldStream.others is not None:
        yield
        return
    before, here = (sys.stdout, sys.stderr), threading.get_ident()
    sys.stdout, sys.stderr = (one and WithheldStream(one) for one in before)
    handlers = [
        (one, one.setStream(WithheldStream(one.stream)))
        for one in logging.getLogger().handlers
        if isinstance(one, logging.StreamHandler) and not isinstance(one, logging.FileHandler)
    ]
    WithheldStream.others = frozenset(one.ident for one in threading.enumerate() if one.ident) - {here}
    try:
        yield
    finally:
        WithheldStream.others = None
        for handler, stream in handlers:
            handler.setStream(stream)
        sys.stdout, sys.stderr = before
