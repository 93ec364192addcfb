"""The standard streams of our processes, in whatever state they were inherited. A failed print never ends a training.

    closed (a daemon's, `>&-`)            output is discarded
    a pipe without a reader (`| head`)    output is discarded from then on
    a full disk (`>/dev/full`)            the same; `output_trouble` reports it at the end
    an encoding without our characters    others are written instead

Does not import torch or anything slow, because commands and workers start with it.
"""

from __future__ import annotations

import codecs
import io
import os
import select
import sys
from contextlib import contextmanager, suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, TextIO

PLAIN = {"…": "...", "█": "#", "░": ".", "·": "-", "→": "->"}  # for terminals without these characters


class SteadyFile(io.FileIO):
    """The file of a standard stream. After a failed write, it discards everything."""

    def __init__(self, file: int) -> None:
        super().__init__(file, "w", closefd=False)
        self.trouble: OSError | None = None

    def write(self, data: Any, /) -> int:
        try:
            while self.trouble is None:
                written = super().write(data)
                if written is not None:
                    return written
                select.select([], [self], [])  # non-blocking, and full at the moment
        except OSError as error:
            self.trouble = error
        return memoryview(data).nbytes


def prepare_streams() -> None:
    """Make printing safe in this process. Streams that somebody else installed (a test, a notebook) are left alone."""
    for _ in closed_files():
        os.open(
            os.devnull, os.O_RDWR
        )  # opens the lowest free number; else the next opened file would get it, and prints would go there
    if sys.stdout is sys.__stdout__:
        sys.stdout = sys.__stdout__ = steady_stream(sys.stdout, 1)  # type: ignore[misc]
    if sys.stderr is sys.__stderr__:
        sys.stderr = sys.__stderr__ = steady_stream(sys.stderr, 2)  # type: ignore[misc]
    for stream in (sys.stdout, sys.stderr):
        speak_plainly(stream)


def closed_files() -> list[int]:
    """Those of the descriptors 0, 1 and 2 that are not open."""
    closed = []
    for file in (0, 1, 2):
        try:
            os.fstat(file)
        except OSError:
            closed.append(file)
    return closed


@contextmanager
def standard_files() -> Iterator[None]:
    """While inside, descriptors 0, 1 and 2 are open, so that no pipe to another process gets their number."""
    opened = [os.open(os.devnull, os.O_RDWR) for _ in closed_files()]
    try:
        yield
    finally:
        for file in opened:
            os.close(file)


def steady_stream(stream: TextIO | None, file: int) -> io.TextIOWrapper:
    """A stream to the same file that never fails."""
    raw = SteadyFile(file)
    if not isinstance(stream, io.TextIOWrapper):  # None: closed when Python started
        return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors="replace", line_buffering=file == 2)
    with suppress(OSError, ValueError):
        stream.flush()
    unbuffered = isinstance(stream.buffer, io.RawIOBase)  # python -u
    return io.TextIOWrapper(
        raw if unbuffered else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def output_trouble() -> OSError | None:
    """Why printed output was lost; None if nothing was, as far as this process knows."""
    stream = sys.stdout
    stream.flush()
    if not isinstance(stream, io.TextIOWrapper):
        return None
    raw = stream.buffer.raw if isinstance(stream.buffer, io.BufferedWriter) else stream.buffer
    return raw.trouble if isinstance(raw, SteadyFile) else None


def speak_plainly(stream: TextIO) -> None:
    """Let a stream accept any text: characters that its encoding lacks are replaced. In the C locale that is all but
    ASCII, although Python assumes UTF-8."""
    locale = next(filter(None, map(os.environ.get, ("LC_ALL", "LC_CTYPE", "LANG"))), "")
    if not isinstance(stream, io.TextIOWrapper) or (
        stream.encoding.lower() in ("utf-8", "utf8") and locale not in ("C", "POSIX")
    ):
        return

    def replacement(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeEncodeError), "only writing is mended"
        return "".join(
            PLAIN.get(one) or one.encode("ascii", "backslashreplace").decode()
            for one in error.object[error.start : error.end]
        ), error.end

    codecs.register_error("shoestring", replacement)
    stream.reconfigure(encoding="ascii" if locale in ("C", "POSIX") else stream.encoding, errors="shoestring")
